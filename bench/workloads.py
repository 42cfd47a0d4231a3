"""Workloads for :func:`bench.traffic.play`: who says what when. All are functions of a seed.

Prompts are token ids, so that their lengths are what they are meant to be; ids are drawn from ``TOKEN_IDS``, which a
vocabulary of 2,000 has and in which ours have no special ones.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.traffic import Conversation, Turn

TOKEN_IDS = range(300, 2000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Log-normal, as prompts and answers of real services are: half are below ``median``, and with ``sigma`` 1 one of
    six is longer than 2.7 times that. Cut off at both ends."""

    median: float
    sigma: float = 0.0
    """0: all alike."""
    shortest: int = 1
    longest: int = 1 << 20

    def draw(self, choose: random.Random) -> int:
        drawn = self.median * math.exp(self.sigma * choose.gauss(0.0, 1.0))
        return min(self.longest, max(self.shortest, round(drawn)))


def text(choose: random.Random, num_tokens: int) -> tuple[int, ...]:
    """Tokens that nobody else begins with."""
    return tuple(choose.choices(TOKEN_IDS, k=num_tokens))


# -- when ------------------------------------------------------------------------------------------------------------


def poisson(choose: random.Random, *, per_s: float, duration_s: float) -> Iterator[float]:
    """Arrivals that know nothing of each other, ``per_s`` on average."""
    at_s = choose.expovariate(per_s)
    while at_s < duration_s:
        yield at_s
        at_s += choose.expovariate(per_s)


def bursts(
    choose: random.Random, *, per_s: float, duration_s: float, period_s: float = 10.0, on_share: float = 0.2
) -> Iterator[float]:
    """As many on average, but all within the first ``on_share`` of each period."""
    for arrival_s in poisson(choose, per_s=per_s, duration_s=duration_s):
        period, within_s = divmod(arrival_s, period_s)
        yield period * period_s + within_s * on_share


def ramp(choose: random.Random, rates: Sequence[tuple[float, float]]) -> Iterator[float]:
    """(arrivals a second, seconds) one after the other: a load that rises and falls."""
    began_s = 0.0
    for per_s, duration_s in rates:
        for at_s in poisson(choose, per_s=per_s, duration_s=duration_s):
            yield began_s + at_s
        began_s += duration_s


# -- what ------------------------------------------------------------------------------------------------------------


def independent(
    arrivals: Sequence[float],
    *,
    prompt: Lengths,
    answer: Lengths,
    seed: int = 0,
    label: str = "",
    tenant: str = "",
    priority: int = 0,
    deadline_s: float = 600.0,
) -> list[Conversation]:
    """One request at each arrival; no two prompts share anything. Add lists of several for a mixture."""
    choose = random.Random(f"independent {seed} {label}")
    return [
        Conversation(
            at_s=at_s,
            turns=(Turn(tokens=text(choose, prompt.draw(choose)), max_tokens=answer.draw(choose)),),
            label=label,
            tenant=tenant,
            priority=priority,
            deadline_s=deadline_s,
        )
        for at_s in arrivals
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix:
    """Applications with a system prompt each, few-shot examples of which a conversation uses one set, and users who
    talk for some turns: so prompts share their beginnings with others, and with what the same user said before."""

    num_systems: int = 8
    system_tokens: int = 512
    num_shots: int = 4
    """Sets of examples of each system."""
    shot_tokens: int = 256
    turns: tuple[int, int] = (1, 4)
    """Of a conversation, at least and at most."""
    user: Lengths = Lengths(median=48, sigma=0.6, shortest=4, longest=400)
    answer: Lengths = Lengths(median=24, sigma=0.5, shortest=2, longest=200)
    think_s: float = 1.0
    """Mean time between an answer and the next turn."""
    skew: float = 1.0
    """Of the systems' popularity (Zipf): the second is asked ``2 ** skew`` times less often than the first. 0: all
    alike."""

    def conversations(
        self, arrivals: Sequence[float], *, seed: int = 0, label: str = "", tenant: str = ""
    ) -> list[Conversation]:
        """One at each arrival."""
        choose = random.Random(f"shared prefix {seed}")
        systems = [text(choose, self.system_tokens) for _ in range(self.num_systems)]
        shots = [[text(choose, self.shot_tokens) for _ in range(self.num_shots)] for _ in systems]
        weights = [1 / (rank + 1) ** self.skew for rank in range(self.num_systems)]
        conversations = []
        for at_s in arrivals:
            number = choose.choices(range(self.num_systems), weights)[0]
            turns = tuple(
                Turn(
                    tokens=text(choose, self.user.draw(choose)),
                    max_tokens=self.answer.draw(choose),
                    think_s=choose.expovariate(1 / self.think_s) if self.think_s else 0.0,
                )
                for _ in range(choose.randint(*self.turns))
            )
            conversations.append(
                Conversation(
                    at_s=at_s,
                    prefix=systems[number] + choose.choice(shots[number]),
                    turns=turns,
                    label=label,
                    tenant=tenant,
                )
            )
        return conversations
