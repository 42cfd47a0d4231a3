"""Learns what things cost from what workers measure. The laws are those of :mod:`router.costs`.

Evidence is kept for each incarnation and for each pair. Estimates are made from the top down: the evidence of all
workers of a model is solved against the defaults, that of a pool against its model, that of a worker against its pool.
So a new worker begins where its pool is, a decode worker that never read a prompt knows what it would take from the
prefill workers of its model, and a worker that differs is known by what itself has shown.

Steps with prompts and steps with answers alone are kept apart. When the steps of one kind drift at one worker, what all
workers of the model know of that kind is old: most of it is dropped, and what comes next decides. A decode worker that
reads a prompt once a minute would believe in its old costs for an hour otherwise.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from core.costs import StepWork
from core.types import CostSamples, HandoffSample, Role, StepSample, WorkerRegistration
from router.costs import UNLIMITED, Costs, HandoffLaw, PairKey, StepLaw, WorkerKey
from router.regression import Evidence, Vector, solve

_DOUBT = 0.02
"""Observations that a prior is worth: the first real one outweighs it wherever that says anything."""
_TRUST = 2.0
"""Observations after which a worker is rather as fast as it looks than as its pool."""

_OLD = 0.02
"""What is kept of evidence that holds no more: less than one observation's worth, a shape."""
_LONGEST_S = 3600.0
"""No step and no hand-off takes longer."""

_STEP = StepLaw()
_STEP_UNITS = (_STEP.fixed_s, _STEP.decode_row_s, _STEP.decode_position_s, _STEP.prompt_token_s, _STEP.prompt_pair_s)
_HANDOFF = HandoffLaw()
_HANDOFF_UNITS = (_HANDOFF.fixed_s, _HANDOFF.byte_s)

Pool = tuple[str, Role]


@dataclass(slots=True)
class _Pair:
    """What one pair has shown."""

    model: str
    evidence: Evidence = field(default_factory=lambda: Evidence(len(_HANDOFF_UNITS)))


@dataclass(slots=True)
class _Shown:
    """What steps have shown, by kind."""

    prompts: Evidence = field(default_factory=lambda: Evidence(len(_STEP_UNITS)))
    answers: Evidence = field(default_factory=lambda: Evidence(len(_STEP_UNITS)))

    def mean(self, other: "_Shown") -> "_Shown":
        return _Shown(prompts=_mean(self.prompts, other.prompts), answers=_mean(self.answers, other.answers))

    def of(self, work: StepWork) -> Evidence:
        return self.prompts if work.num_prompt_tokens else self.answers


@dataclass(slots=True)
class _Worker:
    """What one incarnation has shown."""

    registration: WorkerRegistration
    shown: _Shown = field(default_factory=_Shown)

    @property
    def pool(self) -> Pool:
        return self.registration.model.name, self.registration.role


class CostBook:
    """Used by one event loop. It needs no clock: what is forgotten is forgotten for something newer."""

    def __init__(self) -> None:
        self._workers: dict[WorkerKey, _Worker] = {}
        self._pairs: dict[PairKey, _Pair] = {}
        self._departed: dict[Pool, _Shown] = {}
        """Of workers that are gone: a pool that was empty for a while need not learn again."""
        self._departed_pairs: dict[str, Evidence] = {}
        """The same, by model."""
        self._steps: dict[WorkerKey, StepLaw] = {}
        self._handoffs: dict[PairKey, HandoffLaw] = {}
        self._handoffs_of: dict[WorkerKey, HandoffLaw] = {}
        self._measured: set[str] = set()
        self._costs: Costs | None = Costs()

    def costs(self) -> Costs:
        """What is known now."""
        if self._costs is None:
            self._costs = Costs(
                steps=dict(self._steps),
                handoffs=dict(self._handoffs),
                handoffs_of=dict(self._handoffs_of),
                measured=frozenset(self._measured),
            )
        return self._costs

    def learn(self, registration: WorkerRegistration, samples: CostSamples) -> None:
        """A heartbeat of one incarnation. Also without samples: its pool may know more than when it was heard last.

        Samples come from outside: times that are no times are left out."""
        key = (registration.worker_id, registration.incarnation)
        worker = self._workers.setdefault(key, _Worker(registration))
        law = self._steps.get(key) or self._estimate_steps(worker)
        for sample in samples.steps:
            if _is_time(sample.seconds):
                law = self._learn_step(worker, sample, law)
                if sample.work.num_prompt_tokens:
                    self._measured.add(registration.model.name)
        self._steps[key] = self._estimate_steps(worker)
        handoffs = [sample for sample in samples.handoffs if _is_time(sample.seconds)]
        self._learn_handoffs(key, registration.model.name, handoffs)
        self._costs = None

    def expire(self, alive: Iterable[WorkerKey]) -> None:
        """Forget incarnations that are gone; what they showed stays known of their pools."""
        living = set(alive)
        for key in [key for key in self._workers if key not in living]:
            worker = self._workers.pop(key)
            before = self._departed.get(worker.pool)
            self._departed[worker.pool] = worker.shown if before is None else worker.shown.mean(before)
            self._steps.pop(key, None)
            self._handoffs_of.pop(key, None)
            self._costs = None
        for pair in [pair for pair in self._pairs if not living.issuperset(pair)]:
            gone = self._pairs.pop(pair)
            known = self._departed_pairs.get(gone.model, gone.evidence)
            self._departed_pairs[gone.model] = _mean(known, gone.evidence)
            self._handoffs.pop(pair, None)
            self._costs = None

    # -- steps --------------------------------------------------------------------------------------------------------

    def _learn_step(self, worker: _Worker, sample: StepSample, law: StepLaw) -> StepLaw:
        """Take one in that ``law`` had predicted. Returns what predicts the next one."""
        work, evidence = sample.work, worker.shown.of(sample.work)
        predicted_s = law.step_s(work)
        is_drifting = evidence.is_drifting(sample.seconds, predicted_s=predicted_s)
        if is_drifting:
            for each in self._shown(worker.registration.model.name):
                each.of(work).fade(_OLD)
        evidence.observe(_step_features(work), sample.seconds, predicted_s=predicted_s)
        return self._estimate_steps(worker) if is_drifting else law

    def _estimate_steps(self, worker: _Worker) -> StepLaw:
        model, role = worker.pool
        size = len(_STEP_UNITS)
        of_model = _law(_evidence(self._shown(model)), None, size)
        of_pool = _law(_evidence(self._shown(model, role)), of_model, size)
        law = _law(_evidence([worker.shown]), of_pool, size)
        fixed, decode_row, decode_position, prompt_token, prompt_pair = _scaled(law, _STEP_UNITS)
        return StepLaw(
            fixed_s=fixed,
            decode_row_s=decode_row,
            decode_position_s=decode_position,
            prompt_token_s=prompt_token,
            prompt_pair_s=prompt_pair,
            max_step_tokens=worker.registration.max_step_tokens,
            max_mixed_tokens=worker.registration.max_mixed_tokens or UNLIMITED,
        )

    def _shown(self, model: str, role: Role | None = None) -> list[_Shown]:
        """Of everybody in the pool, or (without a role) of the model."""
        pools = [(model, each) for each in Role] if role is None else [(model, role)]
        departed = [self._departed[pool] for pool in pools if pool in self._departed]
        return departed + [worker.shown for worker in self._workers.values() if worker.pool in pools]

    # -- hand-offs ----------------------------------------------------------------------------------------------------

    def _learn_handoffs(self, decode: WorkerKey, model: str, samples: Sequence[HandoffSample]) -> None:
        size = len(_HANDOFF_UNITS)
        for sample in samples:
            pair = (sample.prefill, decode)
            cost = self._handoffs.get(pair) or self._handoffs_of.get(decode, _HANDOFF)
            evidence = self._pairs.setdefault(pair, _Pair(model)).evidence
            features = (_HANDOFF.fixed_s, _HANDOFF.byte_s * sample.num_bytes)
            predicted_s = cost.handoff_s(sample.num_bytes)
            if evidence.is_drifting(sample.seconds, predicted_s=predicted_s):
                evidence.fade(_OLD)
            evidence.observe(features, sample.seconds, predicted_s=predicted_s)
        departed = [self._departed_pairs[model]] if model in self._departed_pairs else []
        members = [pair.evidence for pair in self._pairs.values() if pair.model == model]
        of_model = _law(departed + members, None, size)
        self._handoffs_of[decode] = _handoff_law(of_model)
        for pair in {(sample.prefill, decode) for sample in samples}:
            law = _law([self._pairs[pair].evidence], of_model, size)
            self._handoffs[pair] = _handoff_law(law)


def _law(members: Iterable[Evidence], above: Vector | None, size: int) -> Vector:
    """What one level (a model, a pool, a worker) knows of a law, in multiples of the default; where its own evidence is
    silent like the level above, at last the defaults."""
    together = Evidence(size)
    for each in members:
        together.add(each)
    if above is None:
        return solve(together, [1.0] * size, doubt=_DOUBT, trust=_DOUBT)
    return solve(together, above, doubt=_DOUBT, trust=_TRUST)


def _evidence(shown: Iterable[_Shown]) -> list[Evidence]:
    return [evidence for each in shown for evidence in (each.prompts, each.answers)]


def _is_time(seconds: float) -> bool:
    return 0 < seconds < _LONGEST_S


def _handoff_law(law: Vector) -> HandoffLaw:
    fixed, byte = _scaled(law, _HANDOFF_UNITS)
    return HandoffLaw(fixed_s=fixed, byte_s=byte)


def _step_features(work: StepWork) -> Vector:
    sizes = (1, work.num_decode_rows, work.num_decode_positions, work.num_prompt_tokens, work.num_prompt_pairs)
    return _scaled(sizes, _STEP_UNITS)


def _scaled(values: Iterable[float], units: Iterable[float]) -> Vector:
    return [value * unit for value, unit in zip(values, units, strict=True)]


def _mean(left: Evidence, right: Evidence) -> Evidence:
    """Of who left before and who leaves now: it stays one worker's worth."""
    mean = Evidence(len(left.moment))
    mean.add(left, 0.5)
    mean.add(right, 0.5)
    return mean
