"""Which of a pair's links is used, and what is told of it. Pure.

A link whose canary failed is not used. Reads that are one-sided by declaration but arrive through sockets are emulated
by the peer's own threads, and are not used: their owner can be aborted by a reader that dies, and bytes may arrive
after an operation was given up. Among the others the first in the order of preference is taken, unless a later one is
``_MUCH`` faster: so where reads crawl, the owner sends instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from core.handoff import LinkMeasure, PeerInfo
from kvtransfer.probe import LinkReport

_MUCH = 3.0
"""A measurement of milliseconds on a shared machine is off by this much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReport:
    """How a pair came to its link: the measurement of each backend that was tried, and the choice."""

    peer: PeerInfo
    links: tuple[LinkReport, ...]
    chosen: LinkReport | None
    """None when no link is usable; ``reason`` says why."""
    reason: str

    def measures(self) -> tuple[LinkMeasure, ...]:
        """For the wire."""
        return tuple(
            LinkMeasure(
                backend=link.backend,
                mode=link.mode,
                lane=link.lane,
                is_used=link is self.chosen,
                connect_s=link.connect_s,
                latency_s=link.latency_s,
                bytes_per_s=link.bytes_per_s,
                memcpy_bytes_per_s=link.memcpy_bytes_per_s,
                slug="" if link.error is None else link.error.slug,
                message="" if link.error is None else link.error.message,
            )
            for link in self.links
        )


def choose(reports: Sequence[LinkReport]) -> LinkReport | None:
    """The link to use, or None. ``reports`` are in order of preference."""
    chosen: LinkReport | None = None
    for report in reports:
        if report.is_usable and (chosen is None or report.bytes_per_s > _MUCH * chosen.bytes_per_s):
            chosen = report
    return chosen


def explain(reports: Sequence[LinkReport], chosen: LinkReport) -> str:
    """One line for people: why this one."""
    passed_over = []
    for report in reports:
        if report is chosen:
            continue
        if report.error is not None:
            passed_over.append(report.error.message)
        else:
            passed_over.append(f"{report.backend} moves {report.bytes_per_s / 1e9:.2f} GB/s")
    rate = f"{chosen.backend} moves {chosen.bytes_per_s / 1e9:.2f} GB/s"
    return "; ".join([rate, *passed_over])
