"""Which tokens a sequence has, and how often its answer has them: kept up to date instead of counted anew each step."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class TokenCounts:
    """Of one sequence. The tokens before ``num_prompt`` are seen, those behind it are counted."""

    def __init__(self, num_prompt: int, *, with_prompt: bool) -> None:
        self._num_prompt = num_prompt
        self._num_seen = 0 if with_prompt else num_prompt
        self._place: dict[int, int] = {}
        self._ids = np.empty(64, np.int64)
        self._counts = np.zeros(64, np.float64)

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Take the tokens that are new since the last call."""
        for index in range(self._num_seen, len(tokens)):
            token_id = tokens[index]
            place = self._place.get(token_id)
            if place is None:
                place = self._place[token_id] = len(self._place)
                if place == len(self._ids):
                    self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                    self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
                self._ids[place] = token_id
            if index >= self._num_prompt:
                self._counts[place] += 1
        self._num_seen = len(tokens)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Each token once."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> npt.NDArray[np.float64]:
        """How often the answer has each of them."""
        return self._counts[: len(self._place)]
