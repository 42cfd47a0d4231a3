"""What became of an admission, for a trace and for the request's record: told when it is over, from what was measured
anyway. Nothing of this is on the way of a token.
"""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from core.spans import Span
from core.telemetry import Telemetry
from core.types import TransferChunk
from kvtransfer.fetch import FetchPart, FetchResult

MAX_CHUNKS = 64
"""Of one hand-off that are told of one by one."""


@dataclass(slots=True, eq=False)
class Asked:
    """Blocks of a hand-off that were asked for together. Times are ``time.monotonic``."""

    first_block: int
    """Within the sequence."""
    num_blocks: int
    source: str
    """Traceparent of the holder's span of them; empty if it has none."""
    digested_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The same, as they moved."""

    asked: Asked
    started_at: float
    ended_at: float
    num_bytes: int
    num_descriptors: int
    is_early: bool
    is_whole: bool
    """The last byte was there by the end of the fetch."""

    @property
    def verify_s(self) -> float:
        """From the last byte until its digests were made; 0 where none were."""
        return 0.0 if self.asked.digested_at is None else max(0.0, self.asked.digested_at - self.ended_at)


def moved(asked: Seq[Asked], result: FetchResult) -> tuple[Moved, ...]:
    """In the order in which they were asked for; what was never begun is left out."""
    now = time.monotonic()
    made = [_moved(one, part, now) for one, part in zip(asked, result.parts, strict=False) if part.begun_s]
    if len(made) <= MAX_CHUNKS:
        return tuple(made)
    rest = made[MAX_CHUNKS - 1 :]
    return (*made[: MAX_CHUNKS - 1], _together(rest))


def _moved(asked: Asked, part: FetchPart, now: float) -> Moved:
    return Moved(
        asked=asked,
        started_at=now - part.begun_s,
        ended_at=now - (part.arrived_s or 0.0),
        num_bytes=part.num_bytes,
        num_descriptors=part.num_descriptors,
        is_early=part.is_early,
        is_whole=part.arrived_s is not None,
    )


def _together(rest: Seq[Moved]) -> Moved:
    return replace(
        rest[0],
        asked=replace(
            rest[0].asked,
            num_blocks=sum(one.asked.num_blocks for one in rest),
            digested_at=rest[-1].asked.digested_at,
        ),
        ended_at=max(one.ended_at for one in rest),
        num_bytes=sum(one.num_bytes for one in rest),
        num_descriptors=sum(one.num_descriptors for one in rest),
        is_whole=all(one.is_whole for one in rest),
    )


def as_chunks(all_moved: Seq[Moved], *, attempt: int, received_at: float) -> tuple[TransferChunk, ...]:
    """For the record; ``received_at`` is the ``time.monotonic`` at which the gateway received the request, as far as
    its age tells."""
    return tuple(
        TransferChunk(
            attempt=attempt,
            start_s=max(0.0, one.started_at - received_at),
            duration_s=max(0.0, one.ended_at - one.started_at),
            num_bytes=one.num_bytes,
            first_block=one.asked.first_block,
            num_blocks=one.asked.num_blocks,
            num_descriptors=one.num_descriptors,
            is_early=one.is_early,
        )
        for one in all_moved
        if one.is_whole
    )


def tell_chunks(telemetry: Telemetry, above: Span, all_moved: Seq[Moved], result: FetchResult) -> None:
    """A span for each, linked to the holder's span of the same blocks."""
    for one in all_moved:
        seconds = one.ended_at - one.started_at
        telemetry.tell(
            "kv.transfer.chunk",
            one.started_at,
            one.ended_at,
            parent=above.traceparent,
            kind="consumer",
            outcome="ok" if one.is_whole else str(result.outcome),
            link=one.asked.source,
            first_block=one.asked.first_block,
            blocks=one.asked.num_blocks,
            bytes=one.num_bytes,
            descriptors=one.num_descriptors,
            backend=result.backend,
            mode=str(result.mode),
            is_early=one.is_early,
            gb_per_s=round(one.num_bytes / seconds / 1e9, 6) if seconds > 0 else 0.0,
            verify_s=one.verify_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """The moments of an admission, as far as it came: ``time.monotonic``."""

    queued_at: float
    reserved_at: float | None
    verified_at: float | None
    running_at: float | None
    first_step_at: float | None
    first_token_at: float | None
    ended_at: float
    is_local: bool


def tell_life(telemetry: Telemetry, above: Span, life: Life, *, num_tokens: int) -> None:
    """What is between the calls: waiting for room, commit, first step, the rest. What did not end, ends here."""
    if not above.is_told:
        return
    parent = above.traceparent

    def tell(name: str, start: float | None, end: float | None) -> None:
        if start is not None:
            telemetry.tell(name, start, life.ended_at if end is None else end, parent=parent)

    reserved_at = life.ended_at if life.reserved_at is None else life.reserved_at
    telemetry.tell("kv.wait", life.queued_at, reserved_at, parent=parent, reason="space")
    if life.is_local:
        tell("prefill.queue", life.running_at, life.first_step_at)
        tell("prefill.compute", life.first_step_at, life.first_token_at)
    else:
        tell("kv.commit", life.verified_at, life.running_at)
        tell("decode.first_step", life.running_at, life.first_token_at)
    if life.first_token_at is not None:
        telemetry.tell("decode.generate", life.first_token_at, life.ended_at, parent=parent, tokens=num_tokens)
