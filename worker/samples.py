"""What this worker's steps and hand-offs took, for the router, which learns costs from it (router/cost_book.py).

A sample of both kinds of step is kept, the latest ones: answers alone come far more often than prompts, and would push
them out. Everything here is of the event loop.
"""

from collections import deque

from core.costs import StepWork
from core.types import CostSamples, HandoffSample, StepSample, WorkerAddress

_NUM_STEPS = 8
_NUM_HANDOFFS = 8


class SampleLog:
    """Bounded: what nobody takes is replaced by what is newer."""

    def __init__(self) -> None:
        self._prompts: deque[StepSample] = deque(maxlen=_NUM_STEPS)
        self._answers: deque[StepSample] = deque(maxlen=_NUM_STEPS)
        self._handoffs: deque[HandoffSample] = deque(maxlen=_NUM_HANDOFFS)

    def add_step(self, work: StepWork, seconds: float) -> None:
        kind = self._prompts if work.num_prompt_tokens else self._answers
        kind.append(StepSample(work=work, seconds=seconds))

    def add_handoff(self, prefill: WorkerAddress, num_bytes: int, seconds: float) -> None:
        pair = (prefill.worker_id, prefill.incarnation)
        self._handoffs.append(HandoffSample(prefill=pair, num_bytes=num_bytes, seconds=seconds))

    def take(self) -> CostSamples:
        """What came since the last call."""
        samples = CostSamples(steps=(*self._prompts, *self._answers), handoffs=tuple(self._handoffs))
        for each in (self._prompts, self._answers, self._handoffs):
            each.clear()
        return samples
