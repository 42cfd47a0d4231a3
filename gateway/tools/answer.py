"""Chat answers whose text is read: calls of tools and reasoning stand in members of their own."""

from collections.abc import Iterable
from dataclasses import replace

from core.types import FinishReason
from gateway.answers import Answer, Fields, Part
from gateway.chat_answer import ChatAnswer
from gateway.parse import Job
from gateway.text import TextDelta
from gateway.tools.output import OutputReader, OutputRules
from gateway.tools.pieces import CallArguments, CallBegun, CallEnded, Content, Piece, Reasoning, joined
from gateway.usage import Usage


def chat_answer(job: Job, request_id: str) -> Answer:
    return ChatAnswer(job, request_id) if job.output is None else ReadChatAnswer(job, request_id, job.output)


class ReadChatAnswer(ChatAnswer):
    passes_text_on = False

    def __init__(self, job: Job, request_id: str, rules: OutputRules) -> None:
        super().__init__(job, request_id)
        self._readers = [OutputReader(rules) for _ in self.parts]
        self._pieces: list[list[Piece]] = [[] for _ in self.parts]
        """Of each choice: what was read and not yet sent (plain: all of it)."""

    def _take(self, part: Part, delta: TextDelta) -> None:
        self._pieces[part.index] += self._readers[part.index].take(delta)
        super()._take(part, delta)

    def _frames(self, part: Part) -> bytes:
        frames = b"" if part.is_open else self._open(part)
        pieces, self._pieces[part.index] = joined(self._pieces[part.index]), []
        for piece in pieces:
            if isinstance(piece, CallEnded):
                continue
            frames += self._piece_chunk(part, piece)
            part.drop()
        if part.finish_reason is not None:
            frames += self._chunk(part, {"delta": {}}, part.finish_reason)
            part.drop()
        return frames

    def _piece_chunk(self, part: Part, piece: Piece) -> bytes:
        match piece:
            case Content(text):
                return self._text_chunk(part, text)
            case Reasoning(text):
                delta: Fields = {"reasoning_content": text}
            case CallBegun():
                delta = {"tool_calls": [{"index": piece.index, **_call(piece, "")}]}
            case CallArguments(index, text):
                delta = {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case _:
                raise AssertionError("marks are not shown")
        return self._chunk(part, {"delta": delta}, None)

    def _whole_content(self, part: Part) -> Fields:
        pieces = self._pieces[part.index]
        content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        calls = [_call(piece, _arguments(pieces, piece.index)) for piece in pieces if isinstance(piece, CallBegun)]
        message: Fields = {"role": "assistant", "content": content, "refusal": None}
        if not content and (calls or reasoning):
            message["content"] = None
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {"message": message}

    def _reason(self, part: Part, finish_reason: FinishReason) -> str:
        return self._readers[part.index].finish_reason(finish_reason)

    def _used(self) -> Usage:
        num_reasoning_tokens = sum(reader.num_reasoning_tokens for reader in self._readers)
        return replace(super()._used(), num_reasoning_tokens=num_reasoning_tokens)


def _call(begun: CallBegun, arguments: str) -> Fields:
    return {"id": begun.call_id, "type": "function", "function": {"name": begun.name, "arguments": arguments}}


def _arguments(pieces: Iterable[Piece], index: int) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, CallArguments) and piece.index == index)
