"""Workloads whose words are not written out: who says how much when, and which parts of it others say too.

A prompt is a sequence of *parts*. Parts with the same key have the same words, whoever makes them of it
(:mod:`bench.client.prompts`), so prompts share exactly the beginnings that they are meant to share.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    key: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What a user says, and how long the answer is to be."""

    parts: tuple[Part, ...]
    max_tokens: int
    think_s: float = 0.0
    """From the end of the answer before on; nothing for the first line."""

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One conversation: a request for each line, whose prompt is all that was said before."""

    lines: tuple[Line, ...]
    at_s: float = 0.0
    """When it begins, from the start of the run on. Without meaning where clients take turns (closed loop)."""
    system: tuple[Part, ...] = ()
    """Said before the first line, by nobody."""
    label: str = ""


def rescaled(scripts: Sequence[Script], *, rate: float) -> list[Script]:
    """The same arrivals faster or slower, ``rate`` conversations a second on average. As they are when all of them
    begin at once."""
    if not scripts:
        return []
    span_s = max(script.at_s for script in scripts)
    factor = len(scripts) / rate / span_s if span_s else 1.0
    return [replace(script, at_s=script.at_s * factor) for script in scripts]


def salted(scripts: Iterable[Script], salt: str) -> list[Script]:
    """The same workload with other words: nothing of an earlier run is cached."""

    def renamed(parts: tuple[Part, ...]) -> tuple[Part, ...]:
        return tuple(replace(part, key=f"{salt}/{part.key}") for part in parts)

    return [
        replace(
            script,
            lines=tuple(replace(line, parts=renamed(line.parts)) for line in script.lines),
            system=renamed(script.system),
        )
        for script in scripts
    ]


def at(times: Iterable[float], scripts: Iterable[Script]) -> Iterator[Script]:
    """The scripts, each at its own time; as many as the shorter of both."""
    for at_s, script in zip(times, scripts, strict=False):
        yield replace(script, at_s=at_s)
