"""Workloads of a seed: fixed, random, shared-prefix, chat (several turns) and mixed (long prompts among short ones)."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bench.client.scripts import Line, Part, Script
from bench.workloads import Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the workloads are made with; each reads what concerns it."""

    prompt: Lengths = field(default_factory=lambda: Lengths(median=512))
    answer: Lengths = field(default_factory=lambda: Lengths(median=128))
    seed: int = 0
    shared: Lengths = field(default_factory=lambda: Lengths(median=1024))
    """Of the beginning that conversations of one application share: ``shared-prefix`` and ``chat``."""
    num_shared: int = 8
    """Applications; the second is used half as often as the first, the third a third as often."""
    turns: tuple[int, int] = (2, 5)
    """Of a chat, at least and at most."""
    think_s: float = 1.0
    long: Lengths = field(default_factory=lambda: Lengths(median=4096, sigma=0.3))
    """Of the long prompts of ``mixed`` ..."""
    long_share: float = 0.1
    """... and how many of all they are."""


def fixed(shape: Shape) -> Iterator[Script]:
    """All prompts and answers are of the median lengths, and no two prompts share anything."""
    for number in itertools.count():
        yield _alone(shape, number, round(shape.prompt.median), round(shape.answer.median))


def random_lengths(shape: Shape) -> Iterator[Script]:
    """Log-normal lengths, and no two prompts share anything."""
    choose = _choose(shape, "random")
    for number in itertools.count():
        yield _alone(shape, number, shape.prompt.draw(choose), shape.answer.draw(choose))


def shared_prefix(shape: Shape) -> Iterator[Script]:
    """Each prompt is one of a few long beginnings, and something of its own behind it."""
    choose = _choose(shape, "shared prefix")
    systems, weights = _systems(shape, choose)
    for number in itertools.count():
        own = Part(key=f"{shape.seed}/own/{number}", num_tokens=shape.prompt.draw(choose))
        system = choose.choices(systems, weights)[0]
        line = Line(parts=(own,), max_tokens=shape.answer.draw(choose))
        yield Script(lines=(line,), system=(system,), label="shared")


def chat(shape: Shape) -> Iterator[Script]:
    """Users of a few applications talk for some turns; each prompt repeats what was said before."""
    choose = _choose(shape, "chat")
    systems, weights = _systems(shape, choose)
    for number in itertools.count():
        lines = tuple(
            Line(
                parts=(Part(key=f"{shape.seed}/chat/{number}/{turn}", num_tokens=shape.prompt.draw(choose)),),
                max_tokens=shape.answer.draw(choose),
                think_s=choose.expovariate(1 / shape.think_s) if shape.think_s else 0.0,
            )
            for turn in range(choose.randint(*shape.turns))
        )
        yield Script(lines=lines, system=(choose.choices(systems, weights)[0],), label="chat")


def mixed(shape: Shape) -> Iterator[Script]:
    """Short prompts, of whose answers every token should come in time, and now and then a long one that would stall
    them. Short prompts alone show nothing of what splitting is for."""
    choose = _choose(shape, "mixed")
    for number in itertools.count():
        is_long = choose.random() < shape.long_share
        length = (shape.long if is_long else shape.prompt).draw(choose)
        yield _alone(shape, number, length, shape.answer.draw(choose), "long" if is_long else "short")


SHAPES: dict[str, Callable[[Shape], Iterator[Script]]] = {
    "fixed": fixed,
    "random": random_lengths,
    "shared-prefix": shared_prefix,
    "chat": chat,
    "mixed": mixed,
}
"""Endless: whoever plays them takes as many as he wants."""


def _choose(shape: Shape, name: str) -> random.Random:
    return random.Random(f"{name} {shape.seed}")


def _alone(shape: Shape, number: int, num_tokens: int, max_tokens: int, label: str = "") -> Script:
    part = Part(key=f"{shape.seed}/alone/{number}", num_tokens=num_tokens)
    return Script(lines=(Line(parts=(part,), max_tokens=max_tokens),), label=label)


def _systems(shape: Shape, choose: random.Random) -> tuple[list[Part], list[float]]:
    systems = [
        Part(key=f"{shape.seed}/system/{number}", num_tokens=shape.shared.draw(choose))
        for number in range(shape.num_shared)
    ]
    return systems, [1 / (rank + 1) for rank in range(len(systems))]


# -- when ------------------------------------------------------------------------------------------------------------


def gamma_arrivals(*, rate: float, burstiness: float = 1.0, seed: int = 0) -> Iterator[float]:
    """Endless. Gaps are gamma-distributed with shape ``burstiness``: 1 is Poisson, less comes in bursts, more is more
    even, infinity is a clock. An infinite rate is all at once."""
    choose = random.Random(f"arrivals {seed}")
    at_s = 0.0
    while True:
        if math.isfinite(rate):
            even = not math.isfinite(burstiness)
            at_s += 1 / rate if even else choose.gammavariate(burstiness, 1 / (rate * burstiness))
        yield at_s
