"""Log probabilities of a prompt's own tokens, taken while the prompt is computed.

Row ``i`` of a prompt scores token ``i + 1``; the first token has none. The head runs in slices, so a long prompt needs
no memory for all its scores at once; rows are padded as elsewhere, so the bits do not depend on the slices.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq

from torch import Tensor

from engine.model.linear import round_up
from engine.sampler import token_logprobs
from engine.scheduler import Chunk

SLICE_ROWS = 64


def score_prompts(logits: Callable[[Tensor], Tensor], hidden_TH: Tensor, chunks: Seq[Chunk], row_multiple: int) -> None:
    """Note the scores of the prompt tokens that follow the rows of ``chunks``, for sequences that want them.
    ``logits`` makes scores ``[R, V]`` of some rows of ``hidden_TH``."""
    first_row = 0
    for chunk in chunks:
        sequence = chunk.sequence
        if sequence.prompt_scores is not None:
            end = min(chunk.end, sequence.num_prompt_tokens - 1)
            for start in range(chunk.start, end, SLICE_ROWS):
                stop = min(start + SLICE_ROWS, end)
                rows = list(range(first_row + start - chunk.start, first_row + stop - chunk.start))
                rows += rows[:1] * (round_up(len(rows), row_multiple) - len(rows))
                raw_RV = logits(hidden_TH[rows])[: stop - start]
                tokens = sequence.tokens[start + 1 : stop + 1]
                num_top = [sequence.sampling.prompt_logprobs or 0] * len(tokens)
                # By position: after a preemption the prompt is computed and scored again.
                sequence.prompt_scores[start:stop] = token_logprobs(raw_RV, tokens, num_top)
        first_row += chunk.num_tokens
