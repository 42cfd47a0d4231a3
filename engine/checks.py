"""What a sequence must be before it may join the steps of others."""

import math

from core.errors import ContextTooLong, InternalError, InvalidRequest
from core.types import SamplingParams
from engine.config import EngineLimits
from engine.sequence import Sequence


def check_sequence(sequence: Sequence, limits: EngineLimits) -> None:
    """The last line of defence: a bad id must fail its own request, not an index operation of everybody's step."""
    sampling, vocab_size = sequence.sampling, limits.vocab_size
    if not sequence.tokens:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    if len(sequence.tokens) >= limits.max_context:
        raise ContextTooLong(
            f"{len(sequence.tokens)} tokens leave no room for an answer in a context of {limits.max_context}"
        )
    if sequence.num_generated >= sampling.max_tokens:
        raise InvalidRequest(f"{sequence.num_generated} tokens are generated, max_tokens is {sampling.max_tokens}")
    if sampling.grammar:
        if sequence.grammar is None:
            raise InternalError("the grammar was not compiled")
        if sampling.ignore_eos:
            raise InvalidRequest("ignore_eos cannot be used with a grammar", param="ignore_eos")
    for param, is_sane in _numbers_of(sampling):
        if not is_sane:
            raise InvalidRequest(f"{param} is out of range", param=param)
    for param, ids in _ids_of(sequence.tokens, sampling):
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            raise InvalidRequest(f"{param} has a token id outside 0..{vocab_size - 1}", param=param)


def _numbers_of(sampling: SamplingParams) -> tuple[tuple[str, bool], ...]:
    """Comparisons with NaN are false, so NaN is never sane."""
    return (
        ("temperature", 0.0 <= sampling.temperature < math.inf),
        ("top_k", sampling.top_k >= 0),
        ("top_p", 0.0 < sampling.top_p <= 1.0),
        ("min_p", 0.0 <= sampling.min_p <= 1.0),
        ("repetition_penalty", 0.0 < sampling.repetition_penalty < math.inf),
        ("frequency_penalty", math.isfinite(sampling.frequency_penalty)),
        ("presence_penalty", math.isfinite(sampling.presence_penalty)),
        ("logit_bias", all(math.isfinite(bias) for _, bias in sampling.logit_bias)),
        ("bad_words", all(sampling.bad_words)),
        ("logprobs", sampling.logprobs is None or sampling.logprobs >= 0),
        ("prompt_logprobs", sampling.prompt_logprobs is None or sampling.prompt_logprobs >= 0),
    )


def _ids_of(tokens: list[int], sampling: SamplingParams) -> tuple[tuple[str, list[int]], ...]:
    return (
        ("prompt", tokens),
        ("stop_token_ids", [*sampling.eos_token_ids, *sampling.stop_token_ids]),
        ("logit_bias", [token_id for token_id, _ in sampling.logit_bias]),
        ("allowed_token_ids", list(sampling.allowed_token_ids)),
        ("bad_words", [token_id for word in sampling.bad_words for token_id in word]),
    )
