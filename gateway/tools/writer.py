"""Where the parsers of calls write: it decides when text is certain to be content or part of a call.

    no call --maybe--> a call may begin --begin--> in a call --end--> no call
                             '--give_up: the held text is content--> no call

Nothing is sent that a later character could turn into something else, and nothing is held longer than that.
"""

import secrets
from collections.abc import Mapping

from gateway.tools.pieces import CallArguments, CallBegun, CallEnded, Content, Piece, Reasoning, Syntax, joined


class PieceWriter:
    """The pieces of one answer. `tools` may be called (by name, with the schemas of their arguments): anything else is
    no call. Calls beyond `max_calls` are read and left out."""

    def __init__(self, tools: Mapping[str, object], *, max_calls: int) -> None:
        self.tools = tools
        self._max_calls = max_calls
        self._pieces: list[Piece] = []
        self._held: list[tuple[str, bool]] = []
        """(text, is it of the arguments) of what may become a call."""
        self._is_in_call = False
        self._is_surplus = False
        self.num_calls = 0
        self.num_incomplete = 0

    def take(self) -> list[Piece]:
        """What became certain since the last time, neighbours of one kind joined."""
        pieces, self._pieces = self._pieces, []
        return joined(pieces) if len(pieces) > 1 else pieces

    # -- outside of calls ----------------------------------------------------------------------------------------------

    def content(self, text: str) -> None:
        """Text that is no call; what was held before it is none either."""
        if text:
            self.give_up()
            self._pieces.append(Content(text))

    def reasoning(self, text: str) -> None:
        """Text of the block of reasoning, and so is what was held before it."""
        if text:
            self._pieces += [Reasoning(held) for held, _ in self._held]
            self._held.clear()
            self._pieces.append(Reasoning(text))

    def maybe(self, text: str) -> None:
        """Text that marks a call, if one comes of it."""
        if not text:
            return
        if self._is_in_call:
            self._pieces.append(Syntax(text))
        else:
            self._held.append((text, False))

    def give_up(self) -> None:
        """No call comes of what was held."""
        self._pieces += [Content(text) for text, _ in self._held]
        self._held.clear()

    def confirm(self) -> None:
        """What was held marks calls that there are."""
        self._pieces += [Syntax(text) for text, _ in self._held]
        self._held.clear()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def begin(self, name: str) -> bool:
        """The name of a call is known; false when no such tool is offered."""
        if name not in self.tools:
            return False
        self._is_in_call = True
        if self.num_calls == self._max_calls:
            self._is_surplus = True
            self.confirm()
            return True
        index = self.num_calls
        self.num_calls += 1
        self._pieces.append(CallBegun(index, f"call_{secrets.token_hex(12)}", name))
        held, self._held = self._held, []
        self._pieces += [CallArguments(index, text) if is_arguments else Syntax(text) for text, is_arguments in held]
        return True

    def arguments(self, text: str) -> None:
        if not text:
            return
        if self._is_surplus:
            self._pieces.append(Syntax(text))
        elif self._is_in_call:
            self._pieces.append(CallArguments(self.num_calls - 1, text))
        else:
            self._held.append((text, True))

    def end(self, *, is_complete: bool) -> None:
        """The call is over, if one began; else what was held is content."""
        if not self._is_in_call:
            return self.give_up()
        self._is_in_call = False
        if self._is_surplus:
            self._is_surplus = False
            return
        self.num_incomplete += not is_complete
        self._pieces.append(CallEnded(self.num_calls - 1, is_complete))

    def finish(self, rest: str) -> None:
        """The text is over, `rest` was not understood. Blank text behind the last call belongs to it."""
        if self._is_in_call:
            self.end(is_complete=False)
        self.content(rest)
        if self.num_calls and not any(text.strip(" \t\n\r") for text, _ in self._held):
            self.confirm()
        self.give_up()
