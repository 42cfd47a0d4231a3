"""One request as its client saw it, filled while the answer comes."""

import time
from dataclasses import dataclass, field

import orjson

from bench.client.scripts import Script


@dataclass(slots=True, kw_only=True)
class Record:
    """Times are those of ``time.perf_counter``."""

    label: str = ""
    due_at: float = 0.0
    """When the workload wanted it to be sent."""
    sent_at: float = 0.0
    ended_at: float = 0.0
    times: list[float] = field(default_factory=list)
    """Of events that carried a part of the answer."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Where they were asked for."""
    num_prompt_tokens: int = 0
    """As the server counts, or as the workload meant when it does not say."""
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    finish_reason: str = ""
    error: str = ""
    """Empty: it was answered to its end."""

    @property
    def is_ok(self) -> bool:
        return not self.error

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.sent_at if self.times else float("inf")

    @property
    def e2e_s(self) -> float:
        """To the last part of the answer."""
        return self.times[-1] - self.sent_at if self.times else float("inf")

    @property
    def tpot_s(self) -> float | None:
        """None with fewer than two tokens."""
        if not self.times or self.num_completion_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.num_completion_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


class AnswerReader:
    """Reads the body of an answer into a record: an event stream, or the JSON of an error."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._rest = b""
        self._num_events = 0
        self._is_over = False
        self._texts: list[str] = []

    def feed(self, data: bytes, at: float) -> None:
        *lines, self._rest = (self._rest + data if self._rest else data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), at)

    def end(self, status: int) -> None:
        """The answer has ended with this HTTP status."""
        record = self._record
        record.ended_at = time.perf_counter()
        record.text = "".join(self._texts)
        record.num_completion_tokens = record.num_completion_tokens or self._num_events
        if status != 200:
            record.error = record.error or _error_of(self._rest, status)
        elif not self._is_over and not record.error and not record.finish_reason:
            record.error = "truncated: the stream ended without a finish reason"
        elif not record.times and not record.error:
            record.error = "empty: no part of an answer came"

    def _event(self, data: bytes, at: float) -> None:
        if data == b"[DONE]":
            self._is_over = True
            return
        record = self._record
        try:
            event = orjson.loads(data)
            if "error" in event:
                record.error = _told(event["error"]) or "error"
                return
            for choice in event["choices"]:
                self._choice(choice, at)
            usage = event.get("usage")
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            record.error = f"malformed event: {data[:80]!r}"
            return
        if usage:
            record.num_prompt_tokens = usage.get("prompt_tokens") or record.num_prompt_tokens
            record.num_completion_tokens = usage.get("completion_tokens") or record.num_completion_tokens
            details = usage.get("prompt_tokens_details") or {}
            record.num_cached_tokens = details.get("cached_tokens") or record.num_cached_tokens

    def _choice(self, choice: dict[str, object], at: float) -> None:
        record = self._record
        delta = choice.get("delta")
        text = choice.get("text") if not isinstance(delta, dict) else _said(delta)
        ids = choice.get("token_ids")
        if isinstance(ids, list):
            record.token_ids += ids
        if text or ids:
            record.times.append(at)
            self._num_events += 1
        if isinstance(text, str) and text:
            self._texts.append(text)
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            record.finish_reason = reason


def _said(delta: dict[str, object]) -> object:
    """What is thought is a part of the answer too."""
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")


def _error_of(body: bytes, status: int) -> str:
    try:
        content = orjson.loads(body)
        told = _told(content.get("error", content)) if isinstance(content, dict) else ""
    except orjson.JSONDecodeError:
        told = ""
    return told or f"http {status}"


def _told(error: object) -> str:
    """The shortest name that it has for itself."""
    if isinstance(error, dict):
        return str(error.get("code") or error.get("type") or error.get("message") or "")
    return str(error) if error else ""


def num_meant(script: Script, line: int) -> int:
    """Prompt tokens of a line of a script as the workload means them, answers included."""
    before = sum(each.num_tokens + each.max_tokens for each in script.lines[:line])
    return sum(part.num_tokens for part in script.system) + before + script.lines[line].num_tokens
