"""How much of its queue a worker has read since it told of it.

A report counts a prompt's tokens until the step that computes them has ended, and what was placed since counts whole
until the next one. So what is known to be queued is more than what is there: for most of the time between two reports
where prompts are short, and while a long step runs. What is *left* is believed instead. It grows with each placement
and shrinks as fast as the worker computes; each report sets it right: there is never more than is known, and never less
by more than the step that runs.

A worker whose report is late may stand still: nothing more is taken off then.
"""

from dataclasses import dataclass

from core.types import WorkerLoad

SILENT_S = 1.0
"""Nothing is taken off so long after a report; others come twice as often."""


@dataclass(slots=True)
class Progress:
    """Of one worker."""

    at: float
    report: WorkerLoad
    left: float
    """Tokens of prompts that it has to compute, at that time."""

    def look(
        self, report: WorkerLoad, *, told_at: float, now: float, num_known: int, max_step_tokens: int, per_s: float
    ) -> int:
        """What is left now. ``report``: the last one, which came at ``told_at``. ``num_known``: tokens that it tells
        of, and of what was placed since. ``per_s``: how many the worker computes in a second."""
        if report is not self.report:
            self._go_on(told_at, per_s)
            self.report = report
            self.left = max(self.left, num_known - min(max_step_tokens, report.queued_prompt_tokens))
        self._go_on(min(now, told_at + SILENT_S), per_s)
        self.left = min(self.left, num_known)
        return round(self.left)

    def idle(self, report: WorkerLoad, *, now: float) -> None:
        """Nothing is left."""
        self.at, self.report, self.left = now, report, 0.0

    def _go_on(self, until: float, per_s: float) -> None:
        if until > self.at:
            self.left = max(0.0, self.left - per_s * (until - self.at))
            self.at = until
