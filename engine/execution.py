"""Where a step is computed: the one part of an engine that knows weights, or does without them.

Two implementations: :class:`engine.forward.ForwardPass` runs the model; :class:`engine.mock.MockExecution` waits as
long as the model would take. Everything else of a worker is the same with both.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from engine.sampler import Sampled
from engine.scheduler import Chunk
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """What one step came to."""

    chunks: tuple[Chunk, ...]
    """Those that were computed, in their order: a device may be at work already on a step without the newest
    sequences. At least one; the others come again."""
    sampled: tuple[Sampled, ...]
    """One for each of them that is sampled, in their order."""
    num_padded_rows: int = 0


class Execution(Protocol):
    """Used by the step thread."""

    def run(self, chunks: Seq[Chunk]) -> Computed:
        """Compute the pending tokens that ``chunks`` name: their KV is in the sequences' blocks when this returns, the
        next token of each chunk that is sampled is drawn (but not appended), and the scores of prompts that want them
        are in ``Sequence.prompt_scores``. Raises nothing that one sequence is to blame for."""

    @property
    def looks_ahead(self) -> bool:
        """Whether steps are faster where a sequence has room for one token more than it has."""

    def settle(self, sequence: Sequence) -> None:
        """Return when nothing writes to the blocks of ``sequence`` any more: before they are given to others."""
