"""What a run amounts to. Definitions are in :data:`DEFINITIONS`, and are printed beside every table."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.client.player import Run
from bench.client.record import Record
from core.errors import ConfigError

PERCENTILES = (50, 90, 95, 99)

DEFINITIONS = {
    "TTFT": "from sending a request to the first part of its answer that is not empty",
    "TPOT": "(E2E - TTFT) / (tokens of the answer - 1), of each request with two tokens or more; aiperf calls it ITL",
    "ITL": "each gap between two events of a stream that carry a part of the answer, of all requests together; "
    "a server that sends several tokens in one event has fewer and longer gaps",
    "E2E": "from sending a request to the last part of its answer",
    "goodput": "requests a second that were answered and met every objective",
    "attainment": "requests that were answered and met every objective, of all that were sent",
    "knee": "the highest rate of the search at which attainment is what was asked for",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What a request must meet to be good. Seconds."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    itl_s: float = math.inf
    """Of each gap."""
    e2e_s: float = math.inf

    @classmethod
    def parse(cls, texts: Iterable[str]) -> "Objective":
        """``ttft=0.5``, ``tpot=50ms``, several also with commas between them. Raises ConfigError."""
        found: dict[str, float] = {}
        for text in (part for each in texts for part in each.split(",")):
            name, _, value = text.partition("=")
            key = f"{name.strip().lower()}_s"
            if key not in cls.__dataclass_fields__:
                raise ConfigError(f"{text!r} is no objective: write ttft=0.5, tpot=50ms, itl=.. or e2e=..")
            found[key] = parse_seconds(value)
        return cls(**found)

    @property
    def is_any(self) -> bool:
        return any(math.isfinite(each) for each in (self.ttft_s, self.tpot_s, self.itl_s, self.e2e_s))

    def is_met(self, record: Record) -> bool:
        return (
            record.is_ok
            and record.ttft_s <= self.ttft_s
            and (record.tpot_s or 0.0) <= self.tpot_s
            and record.e2e_s <= self.e2e_s
            and (math.isinf(self.itl_s) or max(record.itl_s, default=0.0) <= self.itl_s)
        )

    def __str__(self) -> str:
        parts = (("TTFT", self.ttft_s), ("TPOT", self.tpot_s), ("ITL", self.itl_s), ("E2E", self.e2e_s))
        return ", ".join(f"{name} <= {1e3 * value:g} ms" for name, value in parts if math.isfinite(value)) or "none"


def parse_seconds(text: str) -> float:
    """``0.5``, ``0.5s`` or ``500ms``. Raises ConfigError."""
    number = text.strip().lower()
    factor = 1e-3 if number.endswith("ms") else 1.0
    try:
        seconds = float(number.removesuffix("ms").removesuffix("s")) * factor
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise ConfigError(f"{text!r} is no time: write seconds (0.5) or milliseconds (500ms), more than 0")
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of one latency, in seconds. All NaN when nothing was measured."""

    mean: float
    median: float
    std: float
    percentiles: dict[int, float]
    number: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if not values:
            nothing = math.nan
            return cls(
                mean=nothing, median=nothing, std=nothing, percentiles=dict.fromkeys(PERCENTILES, nothing), number=0
            )
        array = np.asarray(values)
        return cls(
            mean=float(array.mean()),
            median=float(np.median(array)),
            std=float(array.std()),
            percentiles={p: float(np.percentile(array, p)) for p in PERCENTILES},
            number=len(values),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    duration_s: float
    """From the start to the end of the last answer."""
    num_requests: int
    num_ok: int
    errors: dict[str, int]
    num_prompt_tokens: int
    """Of answered requests, like the next two."""
    num_cached_tokens: int
    num_completion_tokens: int
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2e: Spread
    lateness: Spread
    """Of sending, behind the time that the workload wanted: what the client itself could not keep up with."""
    tokens_per_event: float
    max_running: int
    max_tokens_per_s: float
    """Events of the best second."""
    num_good: int
    objective: Objective

    @property
    def request_rate(self) -> float:
        return self.num_ok / self.duration_s

    @property
    def output_rate(self) -> float:
        return self.num_completion_tokens / self.duration_s

    @property
    def total_rate(self) -> float:
        return (self.num_prompt_tokens + self.num_completion_tokens) / self.duration_s

    @property
    def goodput(self) -> float:
        return self.num_good / self.duration_s

    @property
    def attainment(self) -> float:
        return self.num_good / max(1, self.num_requests)


def figures(run: Run, objective: Objective) -> Figures:
    good = [record for record in run.records if record.is_ok]
    num_events = sum(len(record.times) for record in good)
    num_tokens = sum(record.num_completion_tokens for record in good)
    return Figures(
        duration_s=max(run.duration_s, 1e-9),
        num_requests=len(run.records),
        num_ok=len(good),
        errors=dict(Counter(record.error for record in run.records if not record.is_ok)),
        num_prompt_tokens=sum(record.num_prompt_tokens for record in good),
        num_cached_tokens=sum(record.num_cached_tokens for record in good),
        num_completion_tokens=num_tokens,
        ttft=Spread.of([record.ttft_s for record in good]),
        tpot=Spread.of([record.tpot_s for record in good if record.tpot_s is not None]),
        itl=Spread.of([gap for record in good for gap in record.itl_s]),
        e2e=Spread.of([record.e2e_s for record in good]),
        lateness=Spread.of([max(0.0, record.sent_at - record.due_at) for record in run.records]),
        tokens_per_event=num_tokens / max(1, num_events),
        max_running=run.max_running,
        max_tokens_per_s=_best_second(good) * num_tokens / max(1, num_events),
        num_good=sum(map(objective.is_met, run.records)),
        objective=objective,
    )


def _best_second(records: Iterable[Record]) -> float:
    seconds = Counter(int(at) for record in records for at in record.times)
    return float(max(seconds.values(), default=0))
