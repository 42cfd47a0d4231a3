"""What an answer is made of once its text was read: content, reasoning and calls of tools, in the order of the text.

Pieces of one kind are append-only: joined contents are the message's content, and the joined arguments of one index are
the text of a call's arguments. Between `CallBegun` and `CallEnded` of an index there are only its `CallArguments`.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The start of a call. Its arguments follow as text."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """Incomplete: the text ended or went wrong inside the call."""

    index: int
    is_complete: bool


@dataclass(frozen=True, slots=True)
class Syntax:
    """Text that marks calls or reasoning and is part of neither. Never shown; kept so that no character is lost
    unseen."""

    text: str


Piece = Content | Reasoning | CallBegun | CallArguments | CallEnded | Syntax


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same, neighbours of one kind as one."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        match piece, last:
            case (Content(text), Content(before)):
                joined[-1] = Content(before + text)
            case (Reasoning(text), Reasoning(before)):
                joined[-1] = Reasoning(before + text)
            case (Syntax(text), Syntax(before)):
                joined[-1] = Syntax(before + text)
            case (CallArguments(index, text), CallArguments(same, before)) if index == same:
                joined[-1] = CallArguments(index, before + text)
            case _:
                joined.append(piece)
    return joined
