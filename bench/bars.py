"""What a bench says last: ratios of one run, each with its bar."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Two figures of one run over each other, and how large (or small) that must be."""

    name: str
    best: float
    """Of the best rounds."""
    median: float
    bar: float
    is_at_most: bool = False

    @property
    def holds(self) -> bool:
        return self.best <= self.bar if self.is_at_most else self.best >= self.bar

    def __str__(self) -> str:
        sign = "<=" if self.is_at_most else ">="
        verdict = "holds" if self.holds else "MISSED"
        return f"{self.name:42} {self.best:5.2f} (medians {self.median:5.2f})  bar {sign} {self.bar}  {verdict}"


def as_json(ratios: Sequence[Ratio]) -> list[dict[str, object]]:
    return [asdict(ratio) | {"holds": ratio.holds} for ratio in ratios]


def show(ratios: Sequence[Ratio]) -> int:
    """Print them; the exit status of the bench."""
    for ratio in ratios:
        print(ratio)
    return 0 if all(ratio.holds for ratio in ratios) else 1
