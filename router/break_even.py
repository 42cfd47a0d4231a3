"""Split or local: what each would cost, in seconds of somebody's waiting. Pure functions.

In ``split`` the client waits for P's queue and the prefill, and again for its second token, until the KV has moved. In
``local`` it waits for D's queue and the prefill between the answers that run there; those are held up by it. The
costs are the learned ones (router/costs.py), the queues are those of the snapshot. The cheaper way is taken, but for a
small share of requests that explore: they take the other one where it is predicted to be no more than ``WORST`` times
as dear, so that what it costs stays known.
"""

import hashlib
from dataclasses import dataclass
from typing import Protocol

from core.types import Prediction, WorkerAddress
from router.costs import Costs

WORST = 3.0
"""Nobody explores what is predicted to cost more than so many times as much."""


TYPICAL_TOKENS = 2048
"""Of a prompt that waits: half of it is what its tokens attend to."""


class Host(Protocol):
    """What has to be known of a worker."""

    @property
    def address(self) -> WorkerAddress: ...
    @property
    def block_size(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def used_blocks(self) -> int: ...
    @property
    def queued_prompt_tokens(self) -> int: ...
    @property
    def num_requests(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What a second of another kind of waiting is worth beside one of the time to the first token."""

    gap: float = 0.25
    """Until the second token: the hand-off."""
    itl: float = 0.1
    """By which running answers are held up, all together."""

    slack: float = 0.05
    """Both together count for no more than this share of the time to the first token: so much of it may be given up for
    them."""

    def cost_s(self, prediction: Prediction) -> float:
        others_s = self.gap * prediction.transfer_s + self.itl * prediction.itl_harm_s
        return prediction.ttft_s + min(others_s, self.slack * prediction.ttft_s)


def predict_split(
    costs: Costs, prefill: Host, decode: Host, *, num_tokens: int, num_cached: int, num_kept: int
) -> Prediction:
    """P holds ``num_cached`` of the prompt's tokens already, D ``num_kept``."""
    wait_s = queue_s(costs, prefill, num_rows=0)
    prefill_s = costs.prefill_s(prefill.address, num_tokens - num_cached, num_cached)
    # Complete chunks move while the next one is computed; what is left when the last one is done are its own blocks.
    num_last = min(num_tokens - num_kept, costs.of(prefill.address).max_step_tokens)
    num_bytes = decode.block_bytes * -(-num_last // decode.block_size)
    return Prediction(
        prefill_wait_s=wait_s,
        prefill_s=prefill_s,
        transfer_s=costs.handoff_s(prefill.address, decode.address, num_bytes),
        ttft_s=wait_s + prefill_s,
        num_cached_tokens=num_cached,
        num_kept_tokens=num_kept,
    )


def predict_local(costs: Costs, worker: Host, *, num_tokens: int, num_cached: int) -> Prediction:
    """The worker holds ``num_cached`` of the prompt's tokens already."""
    num_rows, num_new = worker.num_requests, num_tokens - num_cached
    wait_s = queue_s(costs, worker, num_rows=num_rows)
    if num_rows:
        wait_s += costs.step_s(worker.address, num_rows, _positions(worker)) / 2  # of the step that runs when it comes
    prefill_s = costs.local_prefill_s(
        worker.address, num_new, num_cached, num_rows=num_rows, num_decode_positions=_positions(worker)
    )
    return Prediction(
        prefill_wait_s=wait_s,
        prefill_s=prefill_s,
        ttft_s=wait_s + prefill_s,
        num_cached_tokens=num_cached,
        itl_harm_s=costs.itl_harm_s(worker.address, num_new, num_cached, num_rows=num_rows),
    )


def explores(request_id: str, *, share: float, seed: int) -> bool:
    """Whether this request is one of the share that explores: a function of its id, and as good as random."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8, salt=seed.to_bytes(8, "big")).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def queue_s(costs: Costs, worker: Host, *, num_rows: int) -> float:
    """To compute what is queued at a worker. How long its prompts are is not known: they are taken to be of
    ``TYPICAL_TOKENS`` at most, so that more load never seems less."""
    num_queued = worker.queued_prompt_tokens
    if num_queued <= 0:
        return 0.0
    whole_s = costs.local_prefill_s(
        worker.address, num_queued, num_rows=num_rows, num_decode_positions=_positions(worker)
    )
    pairs_s = costs.of(worker.address).prompt_pair_s * num_queued
    return max(0.0, whole_s - pairs_s * (num_queued - min(num_queued, TYPICAL_TOKENS)) / 2)


def _positions(worker: Host) -> int:
    """Tokens that the answers of a worker attend to."""
    return worker.used_blocks * worker.block_size
