"""What an answer cost, in tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """A prompt counts once, however many choices it has; tokens of choices add up, those of hidden text included."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    num_reasoning_tokens: int = 0
    """Of the completion tokens."""

    def value(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
        }


def usage_of(runs: Sequence[Run]) -> Usage:
    """As of now: true for an answer that is whole, cut off or refused half-way."""
    return Usage(
        num_prompt_tokens=sum(run.request.num_prompt_tokens for run in runs),
        num_completion_tokens=sum(run.num_completion_tokens for run in runs),
        num_cached_tokens=sum(run.num_cached_tokens for run in runs),
    )
