"""A response as it grows: the events that tell of it, and the object that is left at the end.

The joined deltas of an item are the text of its `done` events, of the item itself and of the final response::

    begin -> item added -> [part added -> deltas -> text done -> part done] -> item done -> ... -> completed, incomplete
                        '-> [arguments deltas -> arguments done] ----------^                       or failed
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import orjson

from core.errors import RateLimited, RequestError, ServingError

Fields = dict[str, object]
Status = Literal["in_progress", "completed", "incomplete"]
TEXT, REASONING, CALL = "message", "reasoning", "function_call"


class Item:
    """One member of `output`. `value` is its object as of now."""

    def __init__(self, kind: str, item_id: str, index: int, fields: Mapping[str, object]) -> None:
        self.kind = kind
        self.id = item_id
        self.index = index
        self.status: Status = "in_progress"
        self.logprobs: list[object] = []
        self._fields = fields
        self._texts: list[str] = []

    def add(self, text: str) -> None:
        self._texts.append(text)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def part(self) -> Fields:
        if self.kind == REASONING:
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}

    def value(self, *, is_new: bool = False) -> Fields:
        head: Fields = {"id": self.id, "type": self.kind, "status": self.status, **self._fields}
        if self.kind == CALL:
            return {**head, "arguments": self.text}
        return {**head, "content": [] if is_new else [self.part]}


class ResponseEvents:
    """Frames for one response. `about` is what of the response never changes."""

    def __init__(self, response_id: str, about: Mapping[str, object]) -> None:
        self._id = response_id
        self._about = about
        self._number = 0
        self._items: list[Item] = []
        self._open: Item | None = None

    # -- what is told -------------------------------------------------------------------------------------------------

    def begin(self) -> bytes:
        whole = self.response("in_progress")
        return self._frame("response.created", response=whole) + self._frame("response.in_progress", response=whole)

    def text(self, delta: str, logprobs: Sequence[object] = ()) -> bytes:
        frames = self._within(TEXT, lambda: ("msg", {"role": "assistant"}))
        item = self._current
        item.add(delta)
        item.logprobs += logprobs
        return frames + self._part_frame("response.output_text.delta", item, delta=delta, logprobs=list(logprobs))

    def reasoning(self, delta: str) -> bytes:
        frames = self._within(REASONING, lambda: ("rs", {"summary": []}))
        self._current.add(delta)
        return frames + self._part_frame("response.reasoning_text.delta", self._current, delta=delta)

    def begin_call(self, call_id: str, name: str) -> bytes:
        return self.close("completed") + self._begin_item(CALL, "fc", {"call_id": call_id, "name": name})

    def arguments(self, delta: str) -> bytes:
        item = self._current
        item.add(delta)
        return self._item_frame("response.function_call_arguments.delta", item, delta=delta)

    def close(self, status: Status, logprobs: Sequence[object] = ()) -> bytes:
        """The open item is over, if there is one. `logprobs` are those of tokens that showed no text."""
        item, self._open = self._open, None
        if item is None:
            return b""
        item.status = status
        frames = b""
        if item.kind == CALL:
            name = item.value()["name"]
            frames = self._item_frame("response.function_call_arguments.done", item, arguments=item.text, name=name)
        else:
            item.logprobs += logprobs if item.kind == TEXT else ()
            if item.kind == TEXT:
                frames = self._part_frame(
                    "response.output_text.done", item, text=item.text, logprobs=list(item.logprobs)
                )
            else:
                frames = self._part_frame("response.reasoning_text.done", item, text=item.text)
            frames += self._part_frame("response.content_part.done", item, part=item.part)
        return frames + self._frame("response.output_item.done", output_index=item.index, item=item.value())

    def end(self, usage: Fields, *, is_cut: bool, logprobs: Sequence[object] = (), **extra: object) -> bytes:
        """The model is done; `is_cut`: by the limit of tokens. An answer without any text is an empty message."""
        frames = b""
        if not self._items:
            frames = self._begin_item(TEXT, "msg", {"role": "assistant"})
        status: Status = "incomplete" if is_cut else "completed"
        frames += self.close(status, logprobs)
        return frames + self._frame(f"response.{status}", response=self.ended(usage, is_cut=is_cut, **extra))

    def fail(self, error: ServingError, usage: Fields) -> bytes:
        """Something broke after the response had begun."""
        frames = self.close("incomplete")
        whole = self.response("failed", error=_error_value(error), usage=usage)
        return frames + self._frame("response.failed", response=whole)

    # -- the object ---------------------------------------------------------------------------------------------------

    def ended(self, usage: Fields, *, is_cut: bool, **extra: object) -> Fields:
        """The whole response, once `end` was told."""
        if is_cut:
            extra["incomplete_details"] = {"reason": "max_output_tokens"}
        return self.response("incomplete" if is_cut else "completed", usage=usage, **extra)

    def response(self, status: str, **fields: object) -> Fields:
        return {
            "id": self._id,
            "object": "response",
            "status": status,
            "error": None,
            "incomplete_details": None,
            **self._about,
            "output": [item.value() for item in self._items],
            "usage": None,
            **fields,
        }

    # -- small parts --------------------------------------------------------------------------------------------------

    @property
    def _current(self) -> Item:
        assert self._open is not None, "no item is open"
        return self._open

    def _within(self, kind: str, make: Callable[[], tuple[str, Fields]]) -> bytes:
        """Frames until an item of this kind is open."""
        if self._open is not None and self._open.kind == kind:
            return b""
        prefix, fields = make()
        return self.close("completed") + self._begin_item(kind, prefix, fields)

    def _begin_item(self, kind: str, prefix: str, fields: Fields) -> bytes:
        index = len(self._items)
        item = Item(kind, f"{prefix}_{self._id.removeprefix('resp_')}_{index}", index, fields)
        self._items.append(item)
        self._open = item
        frames = self._frame("response.output_item.added", output_index=index, item=item.value(is_new=True))
        if kind != CALL:
            frames += self._part_frame("response.content_part.added", item, part=item.part)
        return frames

    def _part_frame(self, kind: str, item: Item, **fields: object) -> bytes:
        return self._item_frame(kind, item, content_index=0, **fields)

    def _item_frame(self, kind: str, item: Item, **fields: object) -> bytes:
        return self._frame(kind, item_id=item.id, output_index=item.index, **fields)

    def _frame(self, kind: str, **fields: object) -> bytes:
        number = self._number
        self._number += 1
        event = orjson.dumps({"type": kind, "sequence_number": number, **fields})
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), event)


def _error_value(error: ServingError) -> Fields:
    """Clients know few codes here; ours is the type."""
    code = "server_error"
    if isinstance(error, RateLimited):
        code = "rate_limit_exceeded"
    elif isinstance(error, RequestError):
        code = "invalid_prompt"
    return {"code": code, "message": error.message, "param": error.param, "type": error.code}
