"""The tables of keys and usage, the same in SQLite and PostgreSQL."""

from sqlalchemy import JSON, BigInteger, Column, Index, Integer, LargeBinary, MetaData, String, Table

SCHEMA_VERSION = 1

metadata = MetaData()

schema = Table("baton_schema", metadata, Column("version", Integer, primary_key=True))
"""One row: which tables these are. A gateway refuses tables of another version at start."""

keys = Table(
    "baton_keys",
    metadata,
    Column("key_id", String(12), primary_key=True),
    Column("secret_hash", LargeBinary(32), nullable=False),
    Column("tenant", String(64), nullable=False, index=True),
    Column("terms", JSON, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Column("revoked_at", BigInteger),
)

usage = Table(
    "baton_usage",
    metadata,
    Column("day", String(10), primary_key=True),
    Column("key_id", String(12), primary_key=True),
    Column("model", String(200), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("num_requests", BigInteger, nullable=False),
    Column("num_prompt_tokens", BigInteger, nullable=False),
    Column("num_cached_tokens", BigInteger, nullable=False),
    Column("num_completion_tokens", BigInteger, nullable=False),
    Index("baton_usage_by_tenant", "tenant", "day"),
    Index("baton_usage_by_key", "key_id", "day"),
)
"""Sums for each UTC day (``2026-11-30``), key and model. Cached tokens are part of the prompt tokens."""

writers = Table(
    "baton_usage_writers",
    metadata,
    Column("writer", String(16), primary_key=True),
    Column("last_batch", BigInteger, nullable=False),
    Column("written_at", BigInteger, nullable=False),
)
"""The last batch of each gateway process that is in `usage`: a batch whose answer was lost is not added twice."""
