"""The database of keys and usage: SQLite in a file, or PostgreSQL. Every call is bounded in time.

Nothing here is on the path of a request: keys are cached (`keyring`), usage is written in batches (`ledger`).
"""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import URL, ColumnElement, Row, Select, Table, event, func, insert, literal, make_url, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.schema import CreateIndex, CreateTable

from core.access_config import DATABASE_PASSWORD, AccessConfig
from core.config import read_secret
from core.errors import ConfigError
from gateway.access.errors import OnStoreFailure, StoreAway, StoreFailure, nobody_hears
from gateway.access.keys import KeyRecord, KeyTerms, hash_secret, key_text, new_key
from gateway.access.tables import SCHEMA_VERSION, keys, metadata, schema, usage, writers

NAME = "the database of API keys"
AWAY_PAUSE_S = 1.0
MAX_CONNECTIONS = 4
MAX_ROWS = 500
"""Of one statement: both databases bound its parameters."""
TABLES_LOCK = 0x4241_544F_4E
SQLITE_BUSY = "database is locked"
PAUSE_S = 0.02
SECONDS_A_DAY = 86_400
WRITER_AGE_LIMIT_S = 30 * SECONDS_A_DAY
"""A gateway process that has not written for so long will not repeat a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """What one key used of one model on one day."""

    day: str
    tenant: str
    key_id: str
    model: str
    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageFilter:
    """Days are inclusive; an empty text does not filter."""

    tenant: str = ""
    key_id: str = ""
    since: str = ""
    until: str = ""


class AccessStore:
    """Open it with :meth:`open`, end it with :meth:`close`. Calls raise StoreAway while the database does not
    answer."""

    def __init__(self, engine: AsyncEngine, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._away_until = 0.0
        self.on_failure: OnStoreFailure = nobody_hears
        self._is_postgresql = engine.dialect.name == "postgresql"

    @classmethod
    async def open(cls, config: AccessConfig) -> "AccessStore":
        """Connects and makes the tables if they are not there. Raises ConfigError with the remedy."""
        if config.database is None:
            raise ConfigError(
                "no database of API keys is configured: name one with --set gateway.access.database=FILE, or "
                "postgresql://USER@HOST/NAME"
            )
        store = cls(_engine(config, config.database), config.database_timeout_s)
        try:
            await store._prepare_in_turn()
        except StoreAway as error:
            await store.close()
            raise ConfigError(
                f"cannot use the database of API keys (gateway.access.database): {error.reason}"
            ) from None
        except TypeError as error:  # of the driver: a parameter of the URL that it does not know
            await store.close()
            raise ConfigError(f"cannot use the parameters of gateway.access.database: {error}") from None
        except ConfigError:
            await store.close()
            raise
        return store

    async def close(self) -> None:
        await self._engine.dispose()

    async def _prepare_in_turn(self) -> None:
        """SQLite refuses at once, without a wait, when several processes open a new file at the same time."""
        ends_at = time.monotonic() + self._timeout_s
        while True:
            try:
                return await self._prepare()
            except StoreAway as error:
                if SQLITE_BUSY not in error.reason or time.monotonic() > ends_at:
                    raise
                self._away_until = 0.0
            await asyncio.sleep(PAUSE_S)

    async def _prepare(self) -> None:
        async with self._transaction() as connection:
            if self._is_postgresql:  # "if not exists" alone fails when two gateways start at once
                await connection.execute(select(func.pg_advisory_xact_lock(TABLES_LOCK)))
            for table in metadata.sorted_tables:
                await connection.execute(CreateTable(table, if_not_exists=True))
                for index in sorted(table.indexes, key=lambda index: str(index.name)):
                    await connection.execute(CreateIndex(index, if_not_exists=True))
            first = self._insert(schema).values(version=SCHEMA_VERSION).on_conflict_do_nothing()
            if await connection.scalar(select(func.count()).select_from(schema)) == 0:
                await connection.execute(first)
            version = await connection.scalar(select(func.max(schema.c.version)))
        if version != SCHEMA_VERSION:
            raise ConfigError(
                f"the database of API keys has tables of version {version}, this Baton knows {SCHEMA_VERSION}: run the "
                "Baton that made them, or name another database"
            )

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[AsyncConnection]:
        """All or nothing, in bounded time. A database that failed is left alone for a moment: calls in line behind a
        slow one do not wait their time each."""
        if time.monotonic() < self._away_until:
            raise StoreAway(NAME, "it did not a moment ago")
        try:
            async with asyncio.timeout(self._timeout_s), self._engine.begin() as connection:
                yield connection
        except TimeoutError:
            self._fail(StoreFailure.TIMEOUT)
            raise StoreAway(NAME, f"no answer within {self._timeout_s:g} s") from None
        except (SQLAlchemyError, OSError) as error:
            self._fail(StoreFailure.ERROR)
            cause = getattr(error, "orig", None) or error
            raise StoreAway(NAME, f"{type(cause).__name__}: {cause}") from error

    def _fail(self, failure: StoreFailure) -> None:
        self._away_until = time.monotonic() + AWAY_PAUSE_S
        self.on_failure(failure)

    # -- keys ---------------------------------------------------------------------------------------------------------

    async def create_key(self, terms: KeyTerms, *, expires_at: int | None = None) -> tuple[KeyRecord, str]:
        """The new key, and the text that its holder sends. The text is not kept."""
        key_id, secret = new_key()
        record = KeyRecord(
            key_id=key_id,
            secret_hash=hash_secret(key_id, secret),
            terms=terms,
            created_at=int(time.time()),
            expires_at=expires_at,
            revoked_at=None,
        )
        row = {
            "key_id": key_id,
            "secret_hash": record.secret_hash,
            "tenant": terms.tenant,
            "terms": terms.model_dump(mode="json"),
            "created_at": record.created_at,
            "expires_at": expires_at,
        }
        async with self._transaction() as connection:
            await connection.execute(insert(keys).values(row))
        return record, key_text(key_id, secret)

    async def find_key(self, key_id: str) -> KeyRecord | None:
        async with self._transaction() as connection:
            row = (await connection.execute(select(keys).where(keys.c.key_id == key_id))).one_or_none()
        return None if row is None else _key(row)

    async def list_keys(self, tenant: str = "") -> list[KeyRecord]:
        """Oldest first."""
        query = select(keys).order_by(keys.c.created_at, keys.c.key_id)
        if tenant:
            query = query.where(keys.c.tenant == tenant)
        async with self._transaction() as connection:
            return [_key(row) for row in await connection.execute(query)]

    async def has_keys(self) -> bool:
        async with self._transaction() as connection:
            return await connection.scalar(select(keys.c.key_id).limit(1)) is not None

    async def revoke_key(self, key_id: str) -> KeyRecord | None:
        """The key, revoked now or earlier; None if there is no such key."""
        is_ours = keys.c.key_id == key_id
        async with self._transaction() as connection:
            revoked = update(keys).where(is_ours, keys.c.revoked_at.is_(None)).values(revoked_at=int(time.time()))
            await connection.execute(revoked)
            row = (await connection.execute(select(keys).where(is_ours))).one_or_none()
        return None if row is None else _key(row)

    # -- usage --------------------------------------------------------------------------------------------------------

    async def add_usage(self, rows: Sequence[UsageRow], *, writer: str, batch: int) -> None:
        """Adds a batch to the sums, once: the same batch of the same writer again changes nothing."""
        if not rows:
            return
        async with self._transaction() as connection:
            if await self._is_new(connection, writer, batch):
                ordered = sorted(rows, key=lambda row: (row.day, row.key_id, row.model))  # all lock in one order
                for at in range(0, len(ordered), MAX_ROWS):
                    await connection.execute(self._adding(ordered[at : at + MAX_ROWS]))

    async def _is_new(self, connection: AsyncConnection, writer: str, batch: int) -> bool:
        now = int(time.time())
        moved = await connection.execute(
            update(writers)
            .where(writers.c.writer == writer, writers.c.last_batch < batch)
            .values(last_batch=batch, written_at=now)
        )
        if moved.rowcount:
            return True
        if await connection.scalar(select(writers.c.last_batch).where(writers.c.writer == writer)) is not None:
            return False
        await connection.execute(writers.delete().where(writers.c.written_at < now - WRITER_AGE_LIMIT_S))
        await connection.execute(insert(writers).values(writer=writer, last_batch=batch, written_at=now))
        return True

    def _adding(self, rows: Iterable[UsageRow]) -> sqlite.Insert | postgresql.Insert:
        new = self._insert(usage).values([asdict(row) for row in rows])
        sums = {column.name: column + new.excluded[column.name] for column in usage.c if column.name.startswith("num_")}
        return new.on_conflict_do_update(index_elements=list(usage.primary_key), set_=sums)

    def _insert(self, table: Table) -> sqlite.Insert | postgresql.Insert:
        return postgresql.insert(table) if self._is_postgresql else sqlite.insert(table)

    async def usage(self, which: UsageFilter) -> list[UsageRow]:
        """By day, tenant, key, model."""
        query = _filtered(select(usage), which).order_by(usage.c.day, usage.c.tenant, usage.c.key_id, usage.c.model)
        async with self._transaction() as connection:
            return [UsageRow(**row._mapping) for row in await connection.execute(query)]

    async def num_tokens(self, which: UsageFilter) -> int:
        """Prompt and completion tokens together."""
        total: ColumnElement[int] = usage.c.num_prompt_tokens + usage.c.num_completion_tokens
        async with self._transaction() as connection:
            return int(await connection.scalar(_filtered(select(func.coalesce(func.sum(total), literal(0))), which)))


def _filtered(query: Select[*tuple[object, ...]], which: UsageFilter) -> Select[*tuple[object, ...]]:
    for value, condition in (
        (which.tenant, usage.c.tenant == which.tenant),
        (which.key_id, usage.c.key_id == which.key_id),
        (which.since, usage.c.day >= which.since),
        (which.until, usage.c.day <= which.until),
    ):
        if value:
            query = query.where(condition)
    return query


def _key(row: Row[*tuple[object, ...]]) -> KeyRecord:
    return KeyRecord(
        key_id=row.key_id,
        secret_hash=row.secret_hash,
        terms=KeyTerms.model_validate(row.terms),
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
    )


def _engine(config: AccessConfig, database: str) -> AsyncEngine:
    if "://" not in database:
        return _sqlite_engine(Path(database), config.database_timeout_s)
    url = make_url(database).set(drivername="postgresql+asyncpg")
    if "sslmode" in url.query:  # libpq's word, which people know; the driver's takes the same values
        url = url.update_query_dict({"ssl": url.query["sslmode"]}).difference_update_query(["sslmode"])
    password = read_secret(DATABASE_PASSWORD, config.database_password_file)
    if password is not None:
        url = url.set(password=password)
    try:
        return create_async_engine(
            url,
            pool_size=MAX_CONNECTIONS,
            max_overflow=0,
            pool_timeout=config.database_timeout_s,
            pool_pre_ping=True,
            hide_parameters=True,
            connect_args={"timeout": config.database_timeout_s},
        )
    except ImportError:
        raise ConfigError(
            "gateway.access.database names PostgreSQL, but its driver is not installed: pip install "
            "'baton-serve[postgres]'"
        ) from None


def _sqlite_engine(path: Path, timeout_s: float) -> AsyncEngine:
    if not path.parent.is_dir():
        raise ConfigError(f"the folder of gateway.access.database, {path.parent}, does not exist: make it first")
    with suppress(OSError):  # what is wrong with the file is told when it is opened as a database
        path.touch(mode=0o600)  # nobody else's, as SQLite's own files beside it will be
    engine = create_async_engine(
        URL.create("sqlite+aiosqlite", database=str(path)),
        pool_size=MAX_CONNECTIONS,
        max_overflow=0,
        pool_timeout=timeout_s,
        hide_parameters=True,
        connect_args={"timeout": timeout_s},
    )

    @event.listens_for(engine.sync_engine, "connect")
    def prepare(connection: sqlite3.Connection, record: object) -> None:
        # Readers do not wait for the writer; a commit survives the end of any process (not a power cut).
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=NORMAL")
        cursor.close()

    return engine
