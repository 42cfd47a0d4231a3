"""What is asked of a cluster, as far as its size depends on it: lengths of prompts and answers, and what of prompts is
cached."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.client.scripts import Script

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demand:
    """One entry for each request, by arrival."""

    prompts: Floats
    """Tokens."""
    cached: Floats
    """Tokens at the beginning of a prompt that some request before it had, too: at most so much is found in caches."""
    answers: Floats
    """Tokens."""

    @classmethod
    def of(cls, scripts: Sequence[Script], *, block_size: int) -> "Demand":
        """Lines of a conversation count as requests of their own."""
        prefixes: dict[tuple[int, str, int], int] = {}
        """By what came before (another prefix) and the part behind it."""
        rows: list[tuple[int, int, int]] = []
        for number, script in enumerate(scripts):
            said = [(part.key, part.num_tokens) for part in script.system]
            for line in script.lines:
                said += [(part.key, part.num_tokens) for part in line.parts]
                prompt = sum(num_tokens for _, num_tokens in said)
                cached = min(_walk(prefixes, said), prompt - 1) // block_size * block_size
                rows.append((prompt, cached, line.max_tokens))
                said.append((f"answer/{number}/{len(said)}", line.max_tokens))
                _walk(prefixes, said)  # the answer is cached behind its prompt
        table = np.array(rows, float)
        return cls(prompts=table[:, 0], cached=table[:, 1], answers=table[:, 2])

    def __len__(self) -> int:
        return len(self.prompts)

    def scaled(self, *, prompt: float = 1.0, answer: float = 1.0) -> "Demand":
        return Demand(
            prompts=np.maximum(1, np.round(self.prompts * prompt)),
            cached=np.floor(self.cached * prompt),
            answers=np.maximum(1, np.round(self.answers * answer)),
        )

    def thinned(self, most: int) -> "Demand":
        """At most so many, taken evenly: formulas need no more."""
        chosen = np.linspace(0, len(self) - 1, min(most, len(self))).astype(int)
        return Demand(prompts=self.prompts[chosen], cached=self.cached[chosen], answers=self.answers[chosen])


def _walk(prefixes: dict[tuple[int, str, int], int], parts: Sequence[tuple[str, int]]) -> int:
    """Note all prefixes of these parts. Returns the tokens of the longest one that was known."""
    at, known, is_known = 0, 0, True
    for key, num_tokens in parts:
        step = (at, key, num_tokens)
        is_known = is_known and step in prefixes
        known += num_tokens if is_known else 0
        at = prefixes.setdefault(step, len(prefixes) + 1)
    return known
