"""Several choices of one request: one prompt, computed or moved once, and blocks that they share copy-on-write.

One choice leads: it computes the prompt (or its KV arrives) and pauses behind its first token, which it does even when
that token ends it. The others are forked from its blocks, compute the last token of the prompt again and draw their own
first token from it, each keyed by (seed, choice, position) as if it were alone.
"""

from collections.abc import Sequence as Seq

from core.errors import InvalidRequest
from core.types import GenerateRequest
from engine.engine import Engine
from engine.sequence import Sequence


def check_choices(request: GenerateRequest) -> None:
    """Raises InvalidRequest for choices that cannot share one prompt."""
    numbers = [progress.choice for progress in request.choices]
    if not numbers:
        raise InvalidRequest("the request has no choices", param="n")
    if len(set(numbers)) != len(numbers) or not 0 <= min(numbers) <= max(numbers) < request.sampling.n:
        raise InvalidRequest(f"choices {numbers} are not distinct numbers below n = {request.sampling.n}", param="n")
    if any(progress.accepted != request.choices[0].accepted for progress in request.choices):
        raise InvalidRequest("choices that have come apart are resumed by attempts of their own", param="n")


def num_blocks_apart(num_tokens: int, num_final_tokens: int, block_size: int) -> int:
    """Blocks that each choice but the first needs for itself: those of ``num_tokens`` tokens are shared, as far as no
    choice writes to them."""
    return -(-num_final_tokens // block_size) - max(0, num_tokens - 1) // block_size


def start(engine: Engine, *, leader: Sequence, others: Seq[Sequence]) -> None:
    """Choices that arrive together: the leader brings the blocks that all share."""
    engine.add(leader)
    engine.fork(leader, others)


def fork(engine: Engine, *, leader: Sequence, others: Seq[Sequence]) -> bool:
    """On the step thread, once ``leader`` has paused. False when it is gone (aborted): nothing was forked."""
    if engine.find(leader.key) is not leader:
        return False
    engine.fork(leader, others)
    return True


def fork_and_go_on(engine: Engine, *, leader: Sequence, others: Seq[Sequence], is_over: bool) -> None:
    """The same where the choices are answered: the leader runs on, or is over and gives back what it kept."""
    if fork(engine, leader=leader, others=others):
        leader.pause_at, leader.is_kept = None, False
        if is_over:
            engine.remove(leader.key)
        else:
            engine.add(engine.detach(leader.key))


def discard(engine: Engine, sequences: Seq[Sequence]) -> None:
    """Off the engine with all of them, whatever their state; what they were promised is given back."""
    for sequence in sequences:
        if not engine.remove(sequence.key) and sequence.reservation is not None:
            sequence.reservation.release()
