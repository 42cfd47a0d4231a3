"""What a path would cost, in seconds. Pure functions of the snapshot; a score is minus a cost.

::

    split = read(P) + move(P, D) + write(D)        local = read(W) + write(W)

    read    the wait for what is queued there, the prompt's own computation (more than once: whoever comes next waits
            for it too), where answers run beside it their delay, and the wait for room
    move    the hand-off, once for each that D fetches already, a share of the link, and the distance of the pair
    write   the answer's steps in the batch as it would be, the delay of the others in it, and the wait for room

More load never lowers a cost, and neither does less overlap (law 6). Seconds come from what was learned
(router/costs.py); before anything was measured they are guesses, but the same guesses for every worker.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from core.ids import WorkerId
from core.types import Mode, PlaceRequest, Role
from router.break_even import queue_s
from router.costs import HandoffLaw, WorkerKey
from router.snapshot import Candidate, PolicySettings, Snapshot

WORK_WEIGHT = 2.0
"""A second of computing, beside one of waiting. So a request rather queues for a prefix than has it computed once more
elsewhere, up to twice the wait."""
LINK_WEIGHT = 0.1
"""A second in which bytes move while the prompt is still computed: nobody waits, but the link is taken."""
ANSWER_WEIGHT = 0.1
"""A second in which an answer is written, beside one until it begins."""
HOLD_S = 1.0
"""How long a prefill worker's blocks are taken for it to be held: what is missing comes back in that time."""


class Path(NamedTuple):
    """A feasible way to serve the request."""

    mode: Mode
    decode: Candidate
    prefill: Candidate | None
    cost_s: float
    saved_s: float = 0.0
    """How much more it would cost if the workers held nothing of the prompt."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that whoever reads it need not compute."""
    is_held: bool = False
    """``prefill`` has nothing to compute: it holds what was asked with ``PlaceRequest.held``."""

    @property
    def score(self) -> float:
        return -self.cost_s

    @property
    def num_placed(self) -> int:
        return self.decode.num_placed + (self.prefill.num_placed if self.prefill is not None else 0)

    @property
    def is_untried(self) -> bool:
        """Nothing was ever placed on one of its workers: what that costs is guessed from its pool."""
        return not self.decode.num_placed or (self.prefill is not None and not self.prefill.num_placed)

    @property
    def names(self) -> tuple[str, str]:
        return self.prefill.address.worker_id if self.prefill is not None else "", self.decode.address.worker_id

    def __str__(self) -> str:
        return f"{self.mode}:{'>'.join(filter(None, self.names))}"


class _Read(NamedTuple):
    """Of one worker that would read the prompt."""

    key: WorkerKey
    cost_s: float
    saved_s: float
    num_cached: int
    max_step_tokens: int


class _Write(NamedTuple):
    """Of one worker that would write the answer."""

    key: WorkerKey
    cost_s: float
    num_kept: int
    """Tokens of the prompt that it holds."""
    token_bytes: float
    turns: float
    """Hand-offs that take turns with this one, weighted as waiting for the second token is."""
    link: HandoffLaw
    """To workers that it knows nothing of."""


class Scores:
    """The costs of one request's paths. Those of a worker are shared by its paths: there are many pairs."""

    def __init__(self, request: PlaceRequest, snapshot: Snapshot, settings: PolicySettings) -> None:
        self._snapshot = snapshot
        self._costs = snapshot.costs
        self._settings = settings
        self._num_tokens = request.num_prompt_tokens
        self._num_answer = min(request.max_new_tokens, settings.projected_tokens)
        self._reads: dict[WorkerId, _Read] = {}
        self._writes: dict[WorkerId, _Write] = {}

    # -- paths --------------------------------------------------------------------------------------------------------

    def splits(self, pairs: Sequence[tuple[Candidate, Candidate]]) -> list[Path]:
        """Of pairs of a prefill and a decode worker; those of one prefill worker best come one after the other."""
        paths: list[Path] = []
        reader = None
        for prefill, decode in pairs:
            if prefill is not reader:
                reader, read = prefill, self._read(prefill)
            write = self._writes.get(decode.address.worker_id) or self._write(decode)
            move_s, saved_s = self._move(prefill, decode, read.key, read.max_step_tokens, write)
            cost_s = read.cost_s + move_s + write.cost_s
            paths.append(Path(Mode.SPLIT, decode, prefill, cost_s, read.saved_s + saved_s, read.num_cached))
        return paths

    def held(self, holder: Candidate, decode: Candidate) -> Path:
        """Without the read: it is done."""
        write, max_step_tokens = self._write(decode), self._costs.of(holder.address).max_step_tokens
        move_s, saved_s = self._move(holder, decode, holder.key, max_step_tokens, write)
        return Path(Mode.SPLIT, decode, holder, move_s + write.cost_s, saved_s, is_held=True)

    def local(self, worker: Candidate) -> Path:
        read, write = self._read(worker), self._write(worker)
        return Path(Mode.LOCAL, worker, None, read.cost_s + write.cost_s, read.saved_s, read.num_cached)

    # -- their parts --------------------------------------------------------------------------------------------------

    def _move(
        self, prefill: Candidate, decode: Candidate, prefill_key: WorkerKey, max_step_tokens: int, write: _Write
    ) -> tuple[float, float]:
        """(seconds, how many more if D held nothing of the prompt). What moved before the prompt's last step hides
        behind it, but takes the link."""
        law = self._costs.handoffs.get((prefill_key, write.key)) or write.link
        token_s = law.byte_s * write.token_bytes
        num_left = self._num_tokens - write.num_kept
        num_last = num_left if num_left < max_step_tokens else max_step_tokens
        move_s = write.turns * (law.fixed_s + token_s * num_last) + LINK_WEIGHT * token_s * num_left
        if prefill.place != decode.place:
            move_s += self._settings.distance_s * distance(prefill.place, decode.place)
        if not write.num_kept:
            return move_s, 0.0
        num_spared = min(self._num_tokens, max_step_tokens) - num_last
        return move_s, write.turns * token_s * num_spared + LINK_WEIGHT * token_s * write.num_kept

    def _read(self, worker: Candidate) -> _Read:
        name = worker.address.worker_id
        found = self._reads.get(name)
        if found is None:
            num_cached = num_cached_tokens(worker, self._num_tokens, self._snapshot)
            work_s = self._work_s(worker, num_cached)
            saved_s = self._work_s(worker, 0) - work_s if num_cached else 0.0
            max_step_tokens = self._costs.of(worker.address).max_step_tokens
            cost_s = self._wait_s(worker) + work_s
            found = self._reads[name] = _Read(worker.key, cost_s, saved_s, num_cached, max_step_tokens)
        return found

    def _write(self, worker: Candidate) -> _Write:
        name = worker.address.worker_id
        found = self._writes.get(name)
        if found is None:
            found = self._writes[name] = _Write(
                key=worker.key,
                cost_s=self._write_s(worker),
                num_kept=num_cached_tokens(worker, self._num_tokens, self._snapshot),
                token_bytes=worker.block_bytes / worker.block_size,
                turns=self._settings.weights.gap * (1 + worker.num_transfers),
                link=self._costs.usual_handoff(worker.address),
            )
        return found

    def _wait_s(self, worker: Candidate) -> float:
        """Until the prompt's turn comes."""
        if worker.role is Role.PREFILL:
            return queue_s(self._costs, worker, num_rows=0) + HOLD_S * self._lacking(worker)
        return queue_s(self._costs, worker, num_rows=worker.num_requests)

    def _work_s(self, worker: Candidate, num_cached: int) -> float:
        """The prompt's own, weighted, with the delay of answers beside it."""
        num_new = self._num_tokens - num_cached
        if worker.role is Role.PREFILL:
            return WORK_WEIGHT * self._costs.prefill_s(worker.address, num_new, num_cached)
        num_rows, num_positions = worker.num_requests, worker.used_blocks * worker.block_size
        work_s = self._costs.local_prefill_s(
            worker.address, num_new, num_cached, num_rows=num_rows, num_decode_positions=num_positions
        )
        harm_s = self._costs.itl_harm_s(worker.address, num_new, num_cached, num_rows=num_rows)
        return WORK_WEIGHT * work_s + self._settings.weights.itl * harm_s

    def _lacking(self, prefill: Candidate) -> float:
        """Share of its blocks that a prefill worker lacks for the prompt, or for holding it."""
        num_blocks = prefill.blocks_for(self._num_tokens)
        quota = self._settings.held_fraction * prefill.num_blocks
        missing = max(
            prefill.used_blocks + num_blocks - prefill.num_blocks, prefill.held_blocks + num_blocks - quota, 0.0
        )
        return missing / prefill.num_blocks

    def _write_s(self, worker: Candidate) -> float:
        law, num_rows = self._costs.of(worker.address), worker.num_requests
        num_positions = worker.used_blocks * worker.block_size + self._num_tokens
        step_s = self._costs.step_s(worker.address, num_rows + 1, num_positions)
        answer_s = self._num_answer * (step_s + num_rows * law.decode_row_s)
        # Room comes back as answers end: all of it within the time of one.
        num_blocks = worker.blocks_for(self._num_tokens + self._num_answer)
        missing_blocks = max(0, worker.used_blocks + num_blocks - worker.num_blocks)
        missing_rows = max(0, num_rows + 1 - worker.max_sequences)
        lacking = missing_blocks / worker.num_blocks + missing_rows / worker.max_sequences
        return ANSWER_WEIGHT * answer_s + lacking * self._settings.projected_tokens * step_s


def num_cached_tokens(worker: Candidate, num_tokens: int, snapshot: Snapshot) -> int:
    """Of a prompt. One at least is computed: the answer begins with what it says."""
    num_blocks = snapshot.overlaps.get(worker.key, 0)
    return min(num_blocks * worker.block_size, num_tokens - 1) if num_blocks else 0


@lru_cache(maxsize=4096)
def distance(one: tuple[str, str, str], other: tuple[str, str, str]) -> int:
    """0 on one host, 1 in one rack, 2 in one zone, 3 beyond. What is not known is no difference."""
    if one != other:
        for level, mine, theirs in zip((3, 2, 1), one, other, strict=True):
            if mine and theirs and mine != theirs:
                return level
    return 0
