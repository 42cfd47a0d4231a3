"""Priority classes, as numbers: every request bears one number (lower is served first), and classes never mix."""

from enum import StrEnum


class PriorityClass(StrEnum):
    """Who is served first when there is not room for all. The classes never mix, whatever priority a request asks
    for."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"

    def rank(self, asked: int) -> int:
        """The priority of a request (lower is first, 32 bits) that asks for `asked` within its class."""
        return _BASE[self] + min(max(asked, -_HALF_CLASS), _HALF_CLASS - 1)

    @classmethod
    def of(cls, rank: int) -> "PriorityClass":
        """The class of a request's priority. Numbers beyond all classes belong to the outer ones."""
        return cls.HIGH if rank < -_HALF_CLASS else cls.LOW if rank >= _BASE[cls.LOW] - _HALF_CLASS else cls.NORMAL


_HALF_CLASS = 1 << 28
_BASE = {PriorityClass.HIGH: -(1 << 30), PriorityClass.NORMAL: 0, PriorityClass.LOW: 1 << 30}
