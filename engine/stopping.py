"""The stop rules that a worker can judge, as one pure function. Stop strings are the gateway's (they need text)."""

from dataclasses import dataclass

from core.types import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    reason: FinishReason
    stop_token_id: int | None = None
    """The token that ended the choice, with ``stop``."""


def stop_token_ids(sampling: SamplingParams) -> tuple[int, ...]:
    """Every token that ends the choice: the caller's, and the model's unless they are ignored."""
    return sampling.stop_token_ids if sampling.ignore_eos else sampling.eos_token_ids + sampling.stop_token_ids


def finish_of(
    sampling: SamplingParams,
    *,
    token_id: int,
    num_generated: int,
    num_tokens: int,
    max_context: int,
    is_end: bool = False,
) -> Finish | None:
    """Whether the choice ends with ``token_id``, its newest token (counted in both numbers).

    ``num_generated`` counts from the end of the original prompt, over all attempts. A stop token within the first
    ``min_tokens`` does not end the choice (the sampler holds it down, so it cannot come from there). ``stop`` wins
    over ``length``. ``is_end``: the token ends the choice in any case (its grammar is at its end).
    """
    if is_end or (num_generated > sampling.min_tokens and token_id in stop_token_ids(sampling)):
        return Finish(reason=FinishReason.STOP, stop_token_id=token_id)
    if num_generated >= sampling.max_tokens or num_tokens >= max_context:
        return Finish(reason=FinishReason.LENGTH)
    return None
