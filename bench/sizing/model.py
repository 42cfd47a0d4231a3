"""What a split can serve, by formulas: queues in front of prefill workers, batches of decode workers, and the same
hardware unsplit.

Prompts wait as in M/G/c: Erlang's probability of waiting, an exponential tail, times ``(1 + cv^2) / 2`` (Allen and
Cunneen). Answers are a batch whose size is Poisson around Little's law; a step's time is linear in it. A request meets
its objectives with a probability; the mean over the requests of the demand is the attainment. Where a unified worker
reads a prompt between answers, the prompts that fall into an answer's time are a compound Poisson sum.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import numpy as np

from bench.client.figures import Objective
from bench.sizing.demand import Demand, Floats
from bench.sizing.profile import Profile

_SPREAD = 0.7
"""Of a batch's size as an answer sees it: it lasts long enough to see more than one size."""
_MOST_BUSY = 0.97
"""Beyond it a queue does not settle within any time that anybody measures."""


class Stage(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    KV = "decode KV"
    TRANSFER = "transfer"
    UNIFIED = "unified"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Split:
    """How many workers of each role. Unified ones are the aggregated baseline."""

    prefill: int = 0
    decode: int = 0
    unified: int = 0

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode + self.unified

    def __str__(self) -> str:
        return f"{self.unified} unified" if self.unified else f"{self.prefill}P{self.decode}D"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Of a split at a rate."""

    attainment: float
    stage: Stage
    """What limits it."""
    prefill_load: float = 0.0
    """Busy share of the prefill side (or of unified workers by prompts)."""
    decode_load: float = 0.0
    """Batch over the largest that meets TPOT or fits."""


@dataclass(frozen=True)
class Model:
    """Of one demand on one kind of worker."""

    profile: Profile
    demand: Demand
    objective: Objective
    _memo: dict[Split, tuple[float, Stage]] = field(default_factory=dict, repr=False)

    # -- what requests are --------------------------------------------------------------------------------------------

    @cached_property
    def _alone_s(self) -> Floats:
        """Of each prompt, read by a worker that does nothing else."""
        pairs = zip(self.demand.prompts, self.demand.cached, strict=True)
        return np.array([self.profile.prompt_s(int(length), int(cached)) for length, cached in pairs])

    @cached_property
    def _fixed_s(self) -> float:
        """Of a step with prompts, however short."""
        return min(self.profile.costs.prompt[0][1], float(self._alone_s.min()))

    @cached_property
    def _new_tokens(self) -> Floats:
        return self.demand.prompts - self.demand.cached

    @cached_property
    def _marginal_s(self) -> Floats:
        """Of each prompt, beyond what a step takes anyway."""
        steps = np.ceil(self._new_tokens / self.profile.max_step_tokens)
        return np.maximum(self._alone_s - steps * self._fixed_s, 0.02 * self._alone_s)

    @cached_property
    def _work_s(self) -> Floats:
        """Of each prompt where prompts share steps, as they do under load."""
        return self._marginal_s + self._fixed_s * self._new_tokens / self.profile.max_step_tokens

    @cached_property
    def _context(self) -> float:
        """Of an answer that runs at a random moment: long ones are met more often."""
        contexts = self.demand.prompts + self.demand.answers / 2
        return float(np.average(contexts, weights=self.demand.answers))

    @cached_property
    def _kv_tokens(self) -> float:
        """Of the blocks that such an answer holds, with what the scheduler keeps free for its growth."""
        return self._context + self.profile.block_size

    @cached_property
    def _moved_s(self) -> Floats:
        """A transfer as the second token feels it: the last chunk's."""
        handoff = self.profile.handoff
        last = np.minimum(self._new_tokens, self.profile.max_step_tokens)
        return handoff.fixed_s + handoff.token_s * last

    @property
    def _num_steps(self) -> Floats:
        return np.maximum(self.demand.answers - 1, 0)

    def _step_law(self) -> tuple[float, float]:
        """(fixed, each row) of a decode step around the batches that occur."""
        top = self.profile.max_sequences
        one, many = self.profile.decode_s(1, self._context), self.profile.decode_s(top, self._context)
        row_s = (many - one) / max(1, top - 1)
        return one - row_s, row_s

    # -- attainment ---------------------------------------------------------------------------------------------------

    def judge(self, split: Split, rate: float) -> Verdict:
        return self._unified(split, rate) if split.unified else self._split(split, rate)

    def _split(self, split: Split, rate: float) -> Verdict:
        multi = self._num_steps > 0
        on_time, busy = _meets_ttft(
            rate, split.prefill, self._work_s, self._alone_s + self.profile.first_s, self.objective.ttft_s
        )
        share = float(np.mean(multi))
        each = rate * share / split.decode
        transfer = each * float(np.mean(self._whole_transfer_s[multi])) if share else 0.0
        fixed_s, row_s = self._step_law()
        batch = self._batch(each, fixed_s, row_s, self._num_steps[multi]) if share else 0.0
        room = min(self.profile.max_sequences, self.profile.num_kv_tokens / self._kv_tokens)
        fits = _normal((room - batch) / math.sqrt(max(batch, 1e-9))) if batch < math.inf else 0.0
        waits_s = transfer * float(np.mean(self._moved_s)) / (2 * max(1e-6, 1 - min(transfer, _MOST_BUSY)))
        smooth = np.ones(len(multi))
        if share and transfer < _MOST_BUSY and batch < math.inf:
            steps, gap_s = self._num_steps[multi], self._moved_s[multi] + waits_s + self.profile.first_s / 2
            # (gap + half a step of waiting + steps * step) / steps <= TPOT, solved for the step and so for the batch
            allowed_s = (self.objective.tpot_s * steps - gap_s) / (steps + 0.5)
            smooth[multi] = _batch_below(allowed_s, fixed_s, row_s, batch)
        elif share:
            smooth[multi] = 0.0
        decode = float(np.mean(smooth)) * fits
        attainment = float(np.mean(on_time * smooth)) * fits
        stage = Stage.PREFILL if np.mean(on_time) <= decode else Stage.DECODE
        if stage is Stage.DECODE and fits < np.mean(smooth):
            stage = Stage.KV
        if stage is Stage.DECODE and transfer >= _MOST_BUSY:
            stage = Stage.TRANSFER
        largest = self._largest_batch(fixed_s, row_s, room)
        return Verdict(attainment=attainment, stage=stage, prefill_load=busy, decode_load=batch / largest)

    @cached_property
    def _whole_transfer_s(self) -> Floats:
        """What a transfer keeps its worker's link busy for: all that is not cached at the reader."""
        handoff = self.profile.handoff
        chunks = np.ceil(self._new_tokens / self.profile.max_step_tokens)
        return handoff.fixed_s * chunks + handoff.token_s * self._new_tokens

    def _largest_batch(self, fixed_s: float, row_s: float, room: float) -> float:
        by_tpot = (self.objective.tpot_s - fixed_s) / row_s if row_s > 0 else math.inf
        return max(1e-6, min(by_tpot, room))

    @staticmethod
    def _batch(each: float, fixed_s: float, row_s: float, steps: Floats) -> float:
        """Little: batch = rate * steps * (fixed + row * batch); infinite when answers come faster than they end."""
        tokens = each * float(np.mean(steps))
        return tokens * fixed_s / (1 - tokens * row_s) if tokens * row_s < 1 else math.inf

    def _unified(self, split: Split, rate: float) -> Verdict:
        number, steps = split.unified, self._num_steps
        each = rate / number
        fixed_s, row_s = self._step_law()
        reading = each * float(np.mean(self._marginal_s))
        if reading >= _MOST_BUSY:
            return Verdict(attainment=0.0, stage=Stage.UNIFIED, prefill_load=reading, decode_load=math.inf)
        # Prompts take their share of the time; steps of answers have what is left.
        batch = self._batch(each / (1 - reading), fixed_s, row_s, steps)
        room = min(self.profile.max_sequences, self.profile.num_kv_tokens / self._kv_tokens)
        if batch == math.inf:
            return Verdict(attainment=0.0, stage=Stage.UNIFIED, prefill_load=reading, decode_load=math.inf)
        step_s = fixed_s + row_s * batch
        chunk = self.profile.max_mixed_tokens
        shares_steps = self._new_tokens / chunk
        own_s = self._marginal_s + np.ceil(shares_steps) * step_s + self.profile.first_s
        on_time, busy = _meets_ttft(
            rate, number, self._marginal_s + shares_steps * self._fixed_s, own_s, self.objective.ttft_s
        )
        mean_s = step_s / (1 - reading)
        variance = each * float(np.mean(self._marginal_s**2)) * mean_s / np.maximum(steps, 1)
        variance = variance + (_SPREAD * row_s) ** 2 * batch / (1 - reading) ** 2
        smooth = _normal_all((self.objective.tpot_s - mean_s) / np.sqrt(np.maximum(variance, 1e-18)))
        tokens = float(np.sum(self._new_tokens))
        longest_s = step_s + chunk * float(np.sum(self._marginal_s)) / max(1.0, tokens)
        if self.objective.tpot_s >= longest_s:
            smooth = np.maximum(smooth, _normal((self.objective.tpot_s - longest_s) / max(1e-9, row_s * batch**0.5)))
        smooth = np.where(steps > 0, smooth, 1.0)
        fits = _normal((room - batch) / math.sqrt(max(batch, 1e-9)))
        return Verdict(
            attainment=float(np.mean(on_time * smooth)) * fits,
            stage=Stage.UNIFIED,
            prefill_load=busy,
            decode_load=batch / self._largest_batch(fixed_s, row_s, room),
        )

    # -- rates --------------------------------------------------------------------------------------------------------

    def best_rate(self, split: Split, share: float) -> tuple[float, Stage]:
        """The highest rate at which the attainment is at least ``share``, and what limits it; 0 when there is none."""
        if split not in self._memo:
            self._memo[split] = self._search(split, share)
        return self._memo[split]

    def _search(self, split: Split, share: float) -> tuple[float, Stage]:
        low, high = 0.0, 1.0
        while self.judge(split, high).attainment >= share and high < 1e6:
            low, high = high, 2 * high
        for _ in range(40):
            middle = (low + high) / 2
            if self.judge(split, middle).attainment >= share:
                low = middle
            else:
                high = middle
        stage = self.judge(split, high).stage
        return (low, stage) if low > 1e-6 else (0.0, stage)

    def naive_split(self, num_workers: int) -> Split:
        """By the ratio of mean busy times, a decode batch of 64 taken for granted: what many would do."""
        batch = min(64, self.profile.max_sequences)
        prefill_s = float(np.mean(self._alone_s))
        decode_s = float(np.mean(self._num_steps)) * self.profile.decode_s(batch, self._context) / batch
        prefill = round(num_workers * prefill_s / max(1e-12, prefill_s + decode_s))
        prefill = min(num_workers - 1, max(1, prefill))
        return Split(prefill=prefill, decode=num_workers - prefill)


def _meets_ttft(rate: float, servers: int, work_s: Floats, own_s: Floats, limit_s: float) -> tuple[Floats, float]:
    """Probability of each request, and the busy share."""
    mean_s = float(np.mean(work_s))
    busy = rate * mean_s / servers
    if busy >= _MOST_BUSY:
        return np.zeros(len(own_s)), busy
    if limit_s == math.inf:
        return np.ones(len(own_s)), busy
    variation = float(np.var(work_s)) / mean_s**2
    waiting = _erlang_c(servers, rate * mean_s)
    decay = servers * (1 - busy) / (mean_s * (1 + variation) / 2)
    spare_s = limit_s - own_s
    return np.where(spare_s >= 0, 1 - waiting * np.exp(-decay * np.maximum(spare_s, 0)), 0.0), busy


def _erlang_c(servers: int, offered: float) -> float:
    """Probability of waiting with so many servers at this load (in Erlang)."""
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = offered * blocked / (number + offered * blocked)
    busy = offered / servers
    return blocked / (1 - busy + busy * blocked)


def _batch_below(allowed_s: Floats, fixed_s: float, row_s: float, batch: float) -> Floats:
    """Probability that a step is no longer than allowed."""
    if row_s <= 0:
        met: Floats = np.where(allowed_s >= fixed_s, 1.0, 0.0)
        return met
    largest = (allowed_s - fixed_s) / row_s
    return _normal_all((largest - batch) / (_SPREAD * math.sqrt(max(batch, 1e-9))))


def _normal(value: float) -> float:
    return 0.5 * math.erfc(-value / math.sqrt(2))


def _normal_all(values: Floats) -> Floats:
    return np.array([_normal(float(value)) for value in values])
