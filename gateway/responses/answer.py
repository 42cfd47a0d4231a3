"""The answer of the responses route, plain and streamed: one choice, told as items."""

from collections.abc import Mapping
from dataclasses import replace

import orjson

from core.errors import ServingError
from core.types import FinishReason
from gateway.answers import Part
from gateway.chat_answer import ChatAnswer
from gateway.parse import Job
from gateway.responses.conversation import ResponseRequest
from gateway.responses.events import Fields, ResponseEvents
from gateway.text import TextDelta
from gateway.tools.output import OutputReader
from gateway.tools.pieces import CallArguments, CallBegun, CallEnded, Content, Piece, Reasoning, joined
from gateway.usage import Usage


class ResponsesAnswer(ChatAnswer):
    """Texts and scores are a chat's; what is made of them are events."""

    id_prefix = "resp_"
    passes_text_on = False

    def __init__(self, job: Job, request_id: str, request: ResponseRequest) -> None:
        super().__init__(job, request_id)
        about = {"created_at": self._created, "model": job.model.name, **request.about(job)}
        self._events = ResponseEvents(self._id, about)
        self._has_begun = False
        [self._part] = self.parts
        self._reader = None if job.output is None else OutputReader(job.output)
        self._read: list[Piece] = []
        """What was read and not yet told."""

    def _take(self, part: Part, delta: TextDelta) -> None:
        if self._reader is not None:
            self._read += self._reader.take(delta)
        elif delta.text:
            self._read.append(Content(delta.text))
        super()._take(part, delta)

    # -- streamed -----------------------------------------------------------------------------------------------------

    def _frames(self, part: Part) -> bytes:
        events = self._events
        frames = b""
        if not self._has_begun:
            self._has_begun = True
            frames = events.begin()
        frames += self._pieces(part)
        if part.finish_reason is not None:
            frames += events.end(
                self._usage(),
                is_cut=part.finish_reason is FinishReason.LENGTH,
                logprobs=self._scores(part),
                **self._timing(),
            )
            part.drop()
        return frames

    def closing(self) -> bytes:
        """The last event was told with the finish reason; this route has no closing line."""
        return b""

    def failure(self, error: ServingError) -> bytes:
        return self._events.fail(error, self._usage())

    # -- plain --------------------------------------------------------------------------------------------------------

    def whole(self) -> bytes:
        self._frames(self._part)
        is_cut = self._part.finish_reason is FinishReason.LENGTH
        return orjson.dumps(self._events.ended(self._usage(), is_cut=is_cut, **self._timing()))

    # -- small parts --------------------------------------------------------------------------------------------------

    def _pieces(self, part: Part) -> bytes:
        """What was read adds. Scores go with the text that they are of; those of calls and reasoning are not told."""
        pieces, self._read = joined(self._read), []
        frames = b""
        for piece in pieces:
            match piece:
                case Content(text):
                    frames += self._events.text(text, self._scores(part))
                case Reasoning(text):
                    frames += self._events.reasoning(text)
                case CallBegun():
                    frames += self._events.begin_call(piece.call_id, piece.name)
                case CallArguments(_, text):
                    frames += self._events.arguments(text)
                case CallEnded():
                    frames += self._events.close("completed" if piece.is_complete else "incomplete")
            part.drop()
        return frames

    def _scores(self, part: Part) -> list[object]:
        found = self._logprobs(part)
        content = None if found is None else found["content"]
        return content if isinstance(content, list) else []

    def _usage(self) -> Fields:
        usage = self._used()
        return {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.num_completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
            "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        }

    def _used(self) -> Usage:
        num_reasoning_tokens = 0 if self._reader is None else self._reader.num_reasoning_tokens
        return replace(super()._used(), num_reasoning_tokens=num_reasoning_tokens)

    def _timing(self) -> Mapping[str, object]:
        return {} if self.timing is None else self.timing(self.runs[0])
