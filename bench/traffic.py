"""Open-loop traffic: conversations that begin when their time has come, whatever became of those before, and what each
request of them saw. What to play is made by :mod:`bench.workloads`; whom to ask is an :data:`Ask`.

    samples = await play(cell.ask, workload)                      # the pipeline of a MockCell (bench/cell.py)
    async with over_http(url, model) as ask:                      # or any gateway
        samples = await play(ask, workload)
    print(report(samples, Slo(ttft_s=0.5, tpot_s=0.05)))
"""

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import httpx

from bench.load import quantile

OK = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked once."""

    prompt: tuple[int, ...]
    max_tokens: int
    """The answer has exactly so many."""
    label: str = ""
    """For the reader of the samples."""
    tenant: str = ""
    """Tenants share no cached prefix. Over HTTP it is the key's, not this."""
    priority: int = 0
    seed: int | None = None
    """None: greedy."""
    deadline_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a user adds to a conversation."""

    tokens: tuple[int, ...]
    max_tokens: int
    think_s: float = 0.0
    """Before it, from the end of the answer before on; nothing for the first turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One request for each turn; a prompt is all that was said before. An error ends it."""

    at_s: float
    """When it begins, from the start of the play on."""
    turns: tuple[Turn, ...]
    prefix: tuple[int, ...] = ()
    """Said before the first turn: a system prompt, examples."""
    label: str = ""
    tenant: str = ""
    priority: int = 0
    seed: int | None = None
    deadline_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request as its caller saw it. Seconds."""

    label: str
    tenant: str
    priority: int
    num_prompt_tokens: int
    outcome: str
    """``ok``, or the slug of a typed error."""
    ttft_s: float
    """Infinite where no token came."""
    e2e_s: float
    itl_s: tuple[float, ...]
    """Between arrivals of tokens; those that came together count as one."""
    answer: tuple[int, ...] = ()
    sent_s: float = 0.0
    """From the start of the play on."""
    num_cached_tokens: int = 0
    attempts: int = 0
    mode: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    reason: str = ""
    """Of the placement."""

    @property
    def is_ok(self) -> bool:
        return self.outcome == OK

    @property
    def tpot_s(self) -> float:
        """Mean time of a token behind the first."""
        return (self.e2e_s - self.ttft_s) / max(1, len(self.answer) - 1)


Ask = Callable[[Request], Awaitable[Sample]]
"""Asks and waits for the end. Whatever a cluster may answer is an outcome, not an exception."""


class Stopwatch:
    """Notes when the tokens of one request came; started when made."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._started = time.perf_counter()
        self._times: list[float] = []
        self.answer: list[int] = []

    def tokens(self, token_ids: Sequence[int]) -> None:
        """They have arrived."""
        if token_ids:
            self._times.append(time.perf_counter())
            self.answer += token_ids

    def sample(self, outcome: str, **facts: object) -> Sample:
        """The request has ended. ``facts``: other fields of the sample."""
        ended, request, times = time.perf_counter(), self._request, self._times
        return replace(
            Sample(
                label=request.label,
                tenant=request.tenant,
                priority=request.priority,
                num_prompt_tokens=len(request.prompt),
                outcome=outcome,
                ttft_s=times[0] - self._started if times else float("inf"),
                e2e_s=ended - self._started,
                itl_s=tuple(later - earlier for earlier, later in itertools.pairwise(times)),
                answer=tuple(self.answer),
            ),
            **facts,  # type: ignore[arg-type]
        )


async def play(ask: Ask, conversations: Iterable[Conversation]) -> list[Sample]:
    """Play them all to their ends; the samples in the order in which they were sent."""
    samples: list[Sample] = []
    started = time.perf_counter()

    async def converse(conversation: Conversation) -> None:
        said = conversation.prefix
        for number, turn in enumerate(conversation.turns):
            await asyncio.sleep(turn.think_s if number else conversation.at_s - (time.perf_counter() - started))
            said += turn.tokens
            request = Request(
                prompt=said,
                max_tokens=turn.max_tokens,
                label=conversation.label,
                tenant=conversation.tenant,
                priority=conversation.priority,
                seed=conversation.seed,
                deadline_s=conversation.deadline_s,
            )
            sent_s = time.perf_counter() - started
            sample = await ask(request)
            samples.append(replace(sample, sent_s=sent_s))
            if not sample.is_ok:
                return
            said += sample.answer

    async with asyncio.TaskGroup() as group:
        for conversation in conversations:
            group.create_task(converse(conversation))
    return sorted(samples, key=lambda sample: sample.sent_s)


@asynccontextmanager
async def over_http(url: str, model: str, *, api_key: str = "") -> AsyncIterator[Ask]:
    """An :data:`Ask` of a gateway's completions, streamed."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False, headers=headers) as client:

        async def ask(request: Request) -> Sample:
            body: dict[str, object] = {
                "model": model,
                "prompt": list(request.prompt),
                "max_tokens": request.max_tokens,
                "ignore_eos": True,
                "temperature": 0 if request.seed is None else 1,
                "seed": request.seed,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
                **({"priority": request.priority} if request.priority else {}),
            }
            watch = Stopwatch(request)
            try:
                async with asyncio.timeout(request.deadline_s):
                    return await _stream(client, body, watch)
            except TimeoutError:
                return watch.sample("client_timeout")
            except httpx.HTTPError as error:
                return watch.sample(type(error).__name__)

        yield ask


async def _stream(client: httpx.AsyncClient, body: dict[str, object], watch: Stopwatch) -> Sample:
    cached = 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.is_error:
            content = json.loads(await answer.aread())
            return watch.sample(str(content["error"]["code"]))
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return watch.sample(str(event["error"]["code"]), num_cached_tokens=cached)
            watch.tokens([one for choice in event["choices"] for one in choice.get("token_ids") or ()])
            details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens") or cached
    return watch.sample(OK, num_cached_tokens=cached)


# -- what came of it --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a request must meet to count as good."""

    ttft_s: float = float("inf")
    tpot_s: float = float("inf")

    def is_met(self, sample: Sample) -> bool:
        return sample.is_ok and sample.ttft_s <= self.ttft_s and sample.tpot_s <= self.tpot_s


def goodput(samples: Sequence[Sample], slo: Slo, *, duration_s: float | None = None) -> float:
    """Good requests a second: of ``duration_s``, or from the first one sent to the last end."""
    if not samples:
        return 0.0
    if duration_s is None:
        duration_s = max(each.sent_s + each.e2e_s for each in samples) - min(each.sent_s for each in samples)
    return sum(map(slo.is_met, samples)) / duration_s


def mean_ttft_s(samples: Iterable[Sample]) -> float:
    """Of those that had an answer."""
    return statistics.fmean(sample.ttft_s for sample in samples if sample.is_ok)


def hit_ratio(samples: Sequence[Sample]) -> float:
    """Cached prompt tokens over all prompt tokens, as answers told them."""
    return sum(s.num_cached_tokens for s in samples) / max(1, sum(s.num_prompt_tokens for s in samples))


def report(samples: Sequence[Sample], slo: Slo | None = None) -> str:
    """A few lines for people."""
    good = [sample for sample in samples if sample.is_ok]
    if not good:
        return f"{len(samples)} requests, none answered"
    failed = len(samples) - len(good)
    lines = [
        f"{len(samples)} requests ({failed} failed), {hit_ratio(good):.0%} of prompt tokens cached"
        + (f", goodput {goodput(samples, slo):.2f}/s" if slo is not None else ""),
        "        mean ms    p50 ms    p99 ms",
    ]
    gaps = [gap for sample in good for gap in sample.itl_s]
    for name, values in (
        ("TTFT", [sample.ttft_s for sample in good]),
        ("ITL", gaps or [0.0]),
        ("E2E", [sample.e2e_s for sample in good]),
    ):
        figures = (statistics.fmean(values), quantile(values, 0.5), quantile(values, 0.99))
        lines.append(f"{name:<5}" + "".join(f"{1e3 * value:10.1f}" for value in figures))
    return "\n".join(lines)
