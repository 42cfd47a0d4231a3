"""What OpenAI's answers share, plain and streamed, built from the text deltas of all choices.

A streamed answer is made of prepared frames: what is the same in all chunks of a choice is encoded once, for a token
only its text is. What came while the client was not reading is sent as one chunk.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar

import orjson

from core.errors import ServingError
from core.types import FinishReason, TokenLogprobs
from gateway.http import DONE, stream_failure
from gateway.lane import Lane
from gateway.parse import Job
from gateway.run import Run, Sink
from gateway.text import TextDelta
from gateway.usage import Usage, usage_of

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

Fields = dict[str, object]
"""Members of a JSON object on its way to the encoder."""


class Part:
    """One choice of an answer: what was accepted of it and not yet sent (plain: all of it).

    Token ids and log probabilities wait for a chunk that has text.
    """

    __slots__ = (
        "finish_reason",
        "head",
        "index",
        "is_open",
        "keeps_tokens",
        "logprobs",
        "offsets",
        "prompt_index",
        "stop_reason",
        "texts",
        "token_ids",
    )

    def __init__(self, index: int, prompt_index: int, *, keeps_tokens: bool) -> None:
        self.keeps_tokens = keeps_tokens
        """Ids or log probabilities are part of the answer."""
        self.index = index
        self.prompt_index = prompt_index
        self.is_open = False
        """Its first chunk was made."""
        self.head = b""
        """How every chunk of it that brings only text begins."""
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.offsets: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    def add(self, delta: TextDelta) -> None:
        if delta.text:
            self.texts.append(delta.text)
        if self.keeps_tokens:
            self.token_ids += delta.token_ids
            self.logprobs += delta.logprobs
            self.offsets += delta.offsets
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def drop(self) -> None:
        """What there was is sent."""
        self.texts.clear()
        self.token_ids.clear()
        self.logprobs.clear()
        self.offsets.clear()


class Answer:
    """One answer as it grows. `sink` takes what a choice adds; `frames` and `closing` make a stream, `whole` the plain
    object. Choices are numbered prompt by prompt."""

    object_name: ClassVar[str] = ""
    chunk_name: ClassVar[str] = ""
    id_prefix: ClassVar[str] = ""
    is_per_choice: ClassVar[bool] = False
    """Prompt ids and their log probabilities stand in each choice, not in the answer."""
    passes_text_on: ClassVar[bool] = True
    """A token's text is what a chunk shows of it: nobody reads it on the way."""

    def __init__(self, job: Job, request_id: str) -> None:
        self._job = job
        self._tokenizer = job.model.tokenizer
        self._id = f"{self.id_prefix}{request_id}"
        self._created = int(time.time())
        keeps_tokens = job.return_token_ids or job.num_logprobs is not None
        self.parts = [
            Part(index, index // job.sampling.n, keeps_tokens=keeps_tokens)
            for index in range(len(job.prompts) * job.sampling.n)
        ]
        self.runs: Sequence[Run] = ()
        """One for each prompt; set before anything is taken."""
        self.timing: Callable[[Run], Fields] | None = None
        """Joins the chunk that ends a run."""
        self.on_change: Callable[[], None] = lambda: None
        self._changed: dict[int, Part] = {}
        head = {"id": self._id, "object": self.chunk_name, "created": self._created, "model": job.model.name}
        self._head = b"data: " + orjson.dumps(head)[:-1] + b","
        self._tail = b',"usage":null}\n\n' if job.include_usage else b"}\n\n"
        self._brings_only_text = not job.return_token_ids and job.num_logprobs is None and not job.continuous_usage
        has_lanes = self.passes_text_on and job.stream and self._brings_only_text and not job.rules.stop
        self.lanes = [Lane(self._tokenizer.json_texts) for _ in self.parts] if has_lanes else []
        """One for each choice, or none."""

    def lane(self, index: int) -> Lane | None:
        return self.lanes[index] if self.lanes else None

    def sink(self, index: int) -> Sink:
        return partial(self._take, self.parts[index])

    def _take(self, part: Part, delta: TextDelta) -> None:
        part.add(delta)
        self._changed[part.index] = part
        self.on_change()

    # -- streamed -----------------------------------------------------------------------------------------------------

    @property
    def has_changed(self) -> bool:
        """Something was taken since the last frames."""
        return bool(self._changed)

    def frames(self) -> bytes:
        """The frames for what was taken since the last call; empty while all of it is held back."""
        changed, self._changed = self._changed, {}
        return b"".join([self._frames(part) for part in changed.values()])

    def _frames(self, part: Part) -> bytes:
        frames = b"" if part.is_open else self._open(part)
        text = "".join(part.texts)
        if part.finish_reason is None:
            if text:
                frames += self._text_chunk(part, text)
                part.drop()
            return frames
        if text and self._splits_end():
            frames += self._text_chunk(part, text)
            part.drop()
            text = ""
        frames += self._chunk(part, self._chunk_content(text), part.finish_reason)
        part.drop()
        return frames

    def closing(self) -> bytes:
        """The last frames: the usage chunk, if it was asked for, and the end."""
        if not self._job.include_usage:
            return DONE
        return self._head + b'"choices":[],"usage":' + orjson.dumps(self._used().value()) + b"}\n\n" + DONE

    def failure(self, error: ServingError) -> bytes:
        """The last frames of a stream that breaks."""
        return stream_failure(error)

    def _open(self, part: Part) -> bytes:
        """The frames before the first token of a choice."""
        part.is_open = True
        part.head = self._head + self._text_head(part.index)
        if self.lanes:
            self.lanes[part.index].head = part.head + b'"'
            self.lanes[part.index].tail = b'"' + self._text_tail() + self._tail
        return self._opening(part)

    def _opening(self, part: Part) -> bytes:
        return b""

    def _text_chunk(self, part: Part, text: str) -> bytes:
        if self._brings_only_text:
            return part.head + orjson.dumps(text) + self._text_tail() + self._tail
        return self._chunk(part, self._chunk_content(text), None)

    def _chunk(self, part: Part, content: Fields, finish_reason: FinishReason | None) -> bytes:
        choice: Fields = {"index": part.index, **content}
        choice["logprobs"] = self._logprobs(part)
        choice["finish_reason"] = None if finish_reason is None else self._reason(part, finish_reason)
        rest: Fields = {"choices": [choice]}
        if self._job.return_token_ids:
            choice["token_ids"] = part.token_ids
        if finish_reason is not None:
            choice["stop_reason"] = part.stop_reason
            run = self.runs[part.prompt_index]
            if self.timing is not None and run.is_over:
                rest |= self.timing(run)
        return self._event(rest)

    def _event(self, rest: Fields) -> bytes:
        if self._job.include_usage:
            rest["usage"] = self._used().value() if self._job.continuous_usage else None
        return self._head + orjson.dumps(rest)[1:] + b"\n\n"

    def _used(self) -> Usage:
        return usage_of(self.runs)

    def _reason(self, part: Part, finish_reason: FinishReason) -> str:
        """How the caller is told that a choice has ended."""
        return finish_reason

    def _splits_end(self) -> bool:
        """Whether last text and finish reason travel in two chunks."""
        return False

    def _text_head(self, index: int) -> bytes:
        raise NotImplementedError

    def _text_tail(self) -> bytes:
        raise NotImplementedError

    def _chunk_content(self, text: str) -> Fields:
        raise NotImplementedError

    # -- plain --------------------------------------------------------------------------------------------------------

    def whole(self) -> bytes:
        """The plain answer, when every choice has its finish reason."""
        answer: Fields = {
            "id": self._id,
            "object": self.object_name,
            "created": self._created,
            "model": self._job.model.name,
            "choices": [self._whole_choice(part) for part in self.parts],
            "usage": self._used().value(),
        }
        if not self.is_per_choice:
            answer |= self._about_prompt(0)
        if self.timing is not None:
            answer |= self.timing(max(self.runs, key=lambda run: run.stages.total_s()))
        return orjson.dumps(answer)

    def _whole_choice(self, part: Part) -> Fields:
        choice: Fields = {"index": part.index, **self._whole_content(part)}
        choice["logprobs"] = self._whole_logprobs(part)
        choice["finish_reason"] = None if part.finish_reason is None else self._reason(part, part.finish_reason)
        choice["stop_reason"] = part.stop_reason
        if self._job.return_token_ids:
            choice["token_ids"] = part.token_ids
        return choice | (self._about_prompt(part.prompt_index) if self.is_per_choice else {})

    def _about_prompt(self, index: int) -> Fields:
        fields: Fields = {}
        if self._job.return_token_ids:
            fields["prompt_token_ids"] = self._job.prompts[index].token_ids
        if self._job.shows_prompt_logprobs:
            fields["prompt_logprobs"] = self._prompt_logprobs(index)
        return fields

    def _prompt_logprobs(self, index: int) -> list[Fields | None]:
        """As vLLM writes them: for each prompt token a map by token id; the first token has none."""
        tokens, scores = self._job.prompts[index].token_ids, self.runs[index].prompt_logprobs
        return [None, *(self._scored(token_id, one) for token_id, one in zip(tokens[1:], scores, strict=True))]

    def _scored(self, token_id: int, scores: TokenLogprobs) -> Fields:
        ranked = [(top_id, logprob, rank) for rank, (top_id, logprob) in enumerate(scores.top, 1)]
        if all(top_id != token_id for top_id, _ in scores.top):
            ranked.append((token_id, scores.logprob, scores.rank))
        return {
            str(one): {"logprob": finite(logprob), "rank": rank, "decoded_token": self._tokenizer.token_text(one)}
            for one, logprob, rank in ranked
        }

    def _whole_content(self, part: Part) -> Fields:
        raise NotImplementedError

    def _logprobs(self, part: Part) -> Mapping[str, object] | None:
        """Of the tokens that the part holds; None where there are none or nobody asked."""
        raise NotImplementedError

    def _whole_logprobs(self, part: Part) -> Mapping[str, object] | None:
        return self._logprobs(part)

    def _token_name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._job.tokens_as_ids else self._tokenizer.token_text(token_id)


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
