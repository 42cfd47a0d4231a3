"""The highest rate at which a share of all requests still meets its objectives."""

from collections.abc import Awaitable, Callable

from bench.client.figures import Figures

Probe = Callable[[float], Awaitable[Figures]]
"""Plays the workload at a rate."""


async def find_knee(
    probe: Probe, *, from_rate: float, share: float = 0.9, precision: float = 0.05, most: int = 12
) -> tuple[float, list[tuple[float, Figures]]]:
    """Doubles or halves the rate until the knee is between two, then halves what is between them until it is known to
    ``precision``. Returns it, 0 when no rate met the objectives, and all that was tried."""
    tried: list[tuple[float, Figures]] = []

    async def is_met(rate: float) -> bool:
        found = await probe(rate)
        tried.append((rate, found))
        return found.attainment >= share

    good, bad, rate = 0.0, 0.0, from_rate
    while len(tried) < most and not (good and bad and bad / good <= 1 + precision):
        if await is_met(rate):
            good = rate
        else:
            bad = rate
        rate = (good * bad) ** 0.5 if good and bad else 2 * good if good else bad / 2
    return good, tried
