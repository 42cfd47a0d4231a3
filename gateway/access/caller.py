"""Who is asking, as the handlers see it: what exists for them, whose prefix cache they share, who goes first."""

from dataclasses import dataclass

from gateway.access.keys import KeyRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    key: KeyRecord | None = None
    """None where nobody is asked for a key: then there is one tenant, and it sees everything."""

    @property
    def tenant(self) -> str:
        return "" if self.key is None else self.key.terms.tenant

    @property
    def models(self) -> frozenset[str] | None:
        """The models that exist for the caller; None: all that are served."""
        allowed = None if self.key is None else self.key.terms.models
        return None if allowed is None else frozenset(allowed)

    def salt(self, asked: str) -> str:
        """Of the block hashes. No two tenants have a salt in common, whatever salts their requests bring: neither a
        tenant's name nor a request's salt has a slash."""
        return asked if self.key is None else f"{self.tenant}/{asked}"

    def rank(self, asked: int) -> int:
        """The priority of a request that asks for `asked`."""
        return asked if self.key is None else self.key.terms.priority.rank(asked)


ANYBODY = Caller()
