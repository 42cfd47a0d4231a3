"""The OpenAI answer objects, plain and streamed, built from text deltas.

A streamed answer is made of prepared frames: everything that is the same in all chunks is encoded once for a request.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from core.types import TokenLogprobs
from gateway.parse import Job
from gateway.text import TextDelta
from modelfiles import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

Fields = dict[str, object]
"""Members of a JSON object on its way to the encoder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int

    def value(self) -> Fields:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


@dataclass(slots=True)
class Pending:
    """What was accepted and not yet sent: token ids and log probabilities wait for a chunk that has text."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    def add(self, delta: TextDelta) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.offsets += delta.offsets

    def drop(self) -> None:
        for part in (self.text, self.token_ids, self.logprobs, self.offsets):
            part.clear()


class Answer:
    """One answer as it grows. `stream` yields frames for a delta; `whole` gives the plain object."""

    object_name = ""
    chunk_name = ""
    id_prefix = ""
    prompt_scores_in_choice = False

    def __init__(self, job: Job, request_id: str) -> None:
        self._job = job
        self._tokenizer = job.model.tokenizer
        self._id = f"{self.id_prefix}{request_id}"
        self._created = int(time.time())
        self._pending = Pending()
        head = {"id": self._id, "object": self.chunk_name, "created": self._created, "model": job.model.name}
        self._head = b"data: " + orjson.dumps(head)[:-1] + b","
        self._has_sent_prompt_ids = False

    # -- streamed -----------------------------------------------------------------------------------------------------

    def opening(self) -> bytes:
        """The frames before the first token."""
        return b""

    def stream(self, delta: TextDelta, usage: Usage, extra: Mapping[str, object] | None = None) -> bytes:
        """The frames for a delta; empty while its text is held back. `extra` joins the chunk that ends the choice."""
        pending = self._pending
        pending.add(delta)
        if not delta.text and delta.finish_reason is None:
            return b""
        frames = b""
        if delta.finish_reason is None or self._splits_end(delta):
            frames = self._chunk(pending, "".join(pending.text), None, None, usage, None)
            pending.drop()
        if delta.finish_reason is not None:
            text = "".join(pending.text)
            frames += self._chunk(pending, text, delta.finish_reason, delta.stop_reason, usage, extra)
            pending.drop()
        return frames

    def closing(self, usage: Usage) -> bytes:
        """The usage chunk, if it was asked for."""
        if not self._job.include_usage:
            return b""
        return self._head + b'"choices":[],"usage":' + orjson.dumps(usage.value()) + b"}\n\n"

    def _splits_end(self, delta: TextDelta) -> bool:
        """Whether last text and finish reason travel in two chunks."""
        return False

    def _chunk(
        self,
        pending: Pending,
        text: str,
        finish_reason: str | None,
        stop_reason: str | int | None,
        usage: Usage,
        extra: Mapping[str, object] | None,
    ) -> bytes:
        choice: Fields = {"index": 0, **self._chunk_content(text, finish_reason)}
        choice["logprobs"] = self._logprobs(pending.token_ids, pending.logprobs, pending.offsets)
        choice["finish_reason"] = finish_reason
        if finish_reason is not None:
            choice["stop_reason"] = stop_reason
        rest: Fields = {"choices": [choice], **(extra or {})}
        if self._job.return_token_ids:
            choice["token_ids"] = pending.token_ids
            if not self._has_sent_prompt_ids:
                self._has_sent_prompt_ids = True
                rest["prompt_token_ids"] = self._job.prompt_token_ids
        if self._job.include_usage:
            rest["usage"] = usage.value() if self._job.continuous_usage else None
        return self._head + orjson.dumps(rest)[1:] + b"\n\n"

    def _chunk_content(self, text: str, finish_reason: str | None) -> Fields:
        raise NotImplementedError

    # -- plain --------------------------------------------------------------------------------------------------------

    def collect(self, delta: TextDelta) -> None:
        """Takes a delta of a plain answer."""
        self._pending.add(delta)

    def whole(
        self,
        last: TextDelta | None,
        usage: Usage,
        extra: Mapping[str, object] | None = None,
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> bytes:
        """The plain answer, after all deltas were collected; `last` brought the finish reason (None: echo only)."""
        pending = self._pending
        finish_reason = last.finish_reason if last and last.finish_reason else "length"
        choice: Fields = {"index": 0, **self._whole_content("".join(pending.text))}
        choice["logprobs"] = self._logprobs(pending.token_ids, pending.logprobs, pending.offsets)
        choice["finish_reason"] = finish_reason
        choice["stop_reason"] = last.stop_reason if last else None
        answer: Fields = {
            "id": self._id,
            "object": self.object_name,
            "created": self._created,
            "model": self._job.model.name,
            "choices": [choice],
            "usage": usage.value(),
            **(extra or {}),
        }
        if self._job.return_token_ids:
            choice["token_ids"] = pending.token_ids
            answer["prompt_token_ids"] = self._job.prompt_token_ids
        if self._job.sampling.prompt_logprobs is not None:
            holder = choice if self.prompt_scores_in_choice else answer
            holder["prompt_logprobs"] = self._prompt_logprobs(prompt_logprobs)
        return orjson.dumps(answer)

    def _prompt_logprobs(self, scores: Sequence[TokenLogprobs]) -> list[Fields | None]:
        """As vLLM writes them: for each prompt token a map by token id; the first token has none."""
        tokens = self._job.prompt_token_ids
        return [None, *(self._scored(token_id, one) for token_id, one in zip(tokens[1:], scores, strict=True))]

    def _scored(self, token_id: int, scores: TokenLogprobs) -> Fields:
        ranked = [(top_id, logprob, rank) for rank, (top_id, logprob) in enumerate(scores.top, 1)]
        if all(top_id != token_id for top_id, _ in scores.top):
            ranked.append((token_id, scores.logprob, scores.rank))
        return {
            str(one): {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._tokenizer.token_text(one)}
            for one, logprob, rank in ranked
        }

    def _whole_content(self, text: str) -> Fields:
        raise NotImplementedError

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offsets: Sequence[int]
    ) -> Fields | None:
        raise NotImplementedError


class ChatAnswer(Answer):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def opening(self) -> bytes:
        """The role chunk, once for the choice."""
        choice: Fields = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        rest: Fields = {"choices": [choice]}
        if self._job.return_token_ids:
            self._has_sent_prompt_ids = True
            rest["prompt_token_ids"] = self._job.prompt_token_ids
        if self._job.include_usage:
            rest["usage"] = None
        return self._head + orjson.dumps(rest)[1:] + b"\n\n"

    def _splits_end(self, delta: TextDelta) -> bool:
        return bool(delta.text)

    def _chunk_content(self, text: str, finish_reason: str | None) -> Fields:
        return {"delta": {"content": text} if text else {}}

    def _whole_content(self, text: str) -> Fields:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offsets: Sequence[int]
    ) -> Fields | None:
        if self._job.num_logprobs is None or not token_ids:
            return None
        content = [
            {
                **_token_value(self._tokenizer, token_id, one.logprob),
                "top_logprobs": [
                    _token_value(self._tokenizer, top_id, logprob)
                    for top_id, logprob in one.top[: self._job.num_logprobs]
                ],
            }
            for token_id, one in zip(token_ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


class CompletionAnswer(Answer):
    prompt_scores_in_choice = True
    object_name = "text_completion"
    chunk_name = "text_completion"
    id_prefix = "cmpl-"

    def opening(self) -> bytes:
        """The echoed prompt, if it was asked for."""
        if not self._job.echo:
            return b""
        return self._chunk(
            Pending(),
            self._job.echo,
            None,
            None,
            Usage(num_prompt_tokens=len(self._job.prompt_token_ids), num_completion_tokens=0, num_cached_tokens=0),
            None,
        )

    def _chunk_content(self, text: str, finish_reason: str | None) -> Fields:
        return {"text": text}

    def _whole_content(self, text: str) -> Fields:
        return {"text": self._job.echo + text}

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offsets: Sequence[int]
    ) -> Fields | None:
        if self._job.num_logprobs is None or not token_ids:
            return None
        tokenizer = self._tokenizer
        tops: list[Fields] = []
        for token_id, one in zip(token_ids, logprobs, strict=True):
            top: Fields = {
                tokenizer.token_text(one_id): _finite(value)
                for one_id, value in reversed(one.top[: self._job.num_logprobs])
            }
            top.setdefault(tokenizer.token_text(token_id), _finite(one.logprob))
            tops.append(top)
        return {
            "tokens": [tokenizer.token_text(token_id) for token_id in token_ids],
            "token_logprobs": [_finite(one.logprob) for one in logprobs],
            "top_logprobs": tops,
            "text_offset": list(offsets),
        }


def _token_value(tokenizer: Tokenizer, token_id: int, logprob: float) -> Fields:
    """`bytes` is the truth; `token` is readable, with U+FFFD for a part of a character."""
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
