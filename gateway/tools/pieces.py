"""What an answer is made of once its text was read: content, reasoning and calls of tools, in the order of the text.

Pieces of one kind are append-only: joined contents are the message's content, and the joined arguments of one index are
the text of a call's arguments. Between `CallBegun` and `CallEnded` of an index there are only its `CallArguments`.
"""

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
