"""What an API key is: an id by which it is found, a secret that proves it, and the terms on which it serves."""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field
from typing import Annotated, Self

from pydantic import Field, model_validator

from core.priority import PriorityClass as PriorityClass
from gateway.schemas import Body

KEY_PREFIX = "sk-baton-"
KEY_TEXT = re.compile(r"sk-baton-([0-9a-f]{12})-([A-Za-z0-9_-]{43})")
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Of tenants. No slash and no `@`: a tenant's name begins the salt of its prefix cache (`gate.Caller.salt`)."""
PLAIN_TEXT = r"^[^\x00-\x1f\x7f]*$"
"""What both databases keep and a terminal shows."""
KEY_ID = re.compile(r"[0-9a-f]{12}")
INT63 = 2**63 - 1


Amount = Annotated[int, Field(ge=1, le=INT63)]
ModelName = Annotated[str, Field(min_length=1, max_length=200, pattern=PLAIN_TEXT)]


class KeyTerms(Body, extra="forbid"):
    """What a key allows. An amount that is absent does not limit."""

    tenant: str = Field(min_length=1, max_length=64, pattern=NAME_PATTERN)
    name: str = Field(default="", max_length=200, pattern=PLAIN_TEXT)
    """For people; never a secret."""
    models: Annotated[tuple[ModelName, ...] | None, Field(strict=False)] = None
    """The models that exist for this key; None: all."""
    priority: Annotated[PriorityClass, Field(strict=False)] = PriorityClass.NORMAL
    requests_per_minute: Amount | None = None
    tokens_per_minute: Amount | None = None
    max_streams: Amount | None = None
    """Requests that may run at once, streamed or not."""
    tokens_per_day: Amount | None = None
    tokens_per_month: Amount | None = None

    @model_validator(mode="after")
    def _some_model(self) -> Self:
        if self.models is not None and not self.models:
            raise ValueError("'models' is empty; leave it out to allow all models")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """One key as the database has it. Times are Unix seconds."""

    key_id: str
    secret_hash: bytes = field(repr=False)
    terms: KeyTerms
    created_at: int
    expires_at: int | None
    revoked_at: int | None

    def proves(self, secret: str) -> bool:
        """Whether `secret` is this key's. Takes the same time whatever it is."""
        return hmac.compare_digest(self.secret_hash, hash_secret(self.key_id, secret))

    def is_valid(self, now: float) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


def new_key() -> tuple[str, str]:
    """Id and secret of a fresh key."""
    return secrets.token_hex(6), secrets.token_urlsafe(32)


def key_text(key_id: str, secret: str) -> str:
    """What its holder sends. Shown once; nothing that is kept can make it again."""
    return f"{KEY_PREFIX}{key_id}-{secret}"


def split_key(text: str) -> tuple[str, str] | None:
    """Id and secret, or None for what is no key of ours."""
    match = KEY_TEXT.fullmatch(text)
    return None if match is None else (match[1], match[2])


def hash_secret(key_id: str, secret: str) -> bytes:
    """One SHA-256, salted by the id, and right here: the secret is 256 random bits, so nobody guesses it, from its hash
    no more than without; no two keys share a hash. A slow hash (bcrypt, argon2) makes *guessable* secrets dear to try;
    here it would buy nothing, and give every stranger 100 ms of our processor for a made-up key."""
    return hashlib.sha256(f"baton-key-1\0{key_id}\0{secret}".encode()).digest()


def same_secret(given: str, expected: str) -> bool:
    """Compares two texts in a time that tells nothing, not even their lengths."""
    return hmac.compare_digest(hashlib.sha256(given.encode()).digest(), hashlib.sha256(expected.encode()).digest())
