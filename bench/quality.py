"""How far the cheaper arithmetics are from float32: ``python -m bench.quality``.

Fifty prompts. float32 answers them greedily; the other dtypes then score the very same tokens (mean KL divergence of
their distributions from float32's, and how often their first choice is the same), and answer by themselves (how many
answers are the same to the end).
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from core.config import DEFAULT_MODEL, set_worker_environment
from core.ids import RequestId
from core.types import SamplingParams

SUBJECTS = ("the moon", "bread", "a river", "chess", "the number seven", "rain", "a library", "bees", "salt", "mirrors")
QUESTIONS = (
    "Write one sentence about {}.",
    "What should a child know about {}?",
    "List three facts about {}.",
    "Why do people care about {}?",
    "Explain {} to a visitor from another planet.",
)
PROMPTS = tuple(question.format(subject) for subject in SUBJECTS for question in QUESTIONS)
NUM_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Against float32."""

    dtype: str
    kv_dtype: str
    kl: float
    """Mean over the tokens of the answers, in nats."""
    max_kl: float
    same_choice: float
    """Share of those tokens that are the first choice here too."""
    same_answers: float
    """Share of answers that are equal to the end."""

    def __str__(self) -> str:
        return (
            f"{self.dtype:8} KV {self.kv_dtype:8}  KL {self.kl:.2e} (worst token {self.max_kl:.2e})  "
            f"same first choice {self.same_choice:.1%}  same greedy answers {self.same_answers:.0%}"
        )


def measure_quality(model: str, dtypes: Sequence[tuple[str, str]], num_prompts: int = len(PROMPTS)) -> list[Quality]:
    """Of each (dtype, KV dtype)."""
    import torch
    from torch import Tensor

    from engine.batch import build_batch
    from engine.engine import Engine, EngineConfig
    from engine.scheduler import Chunk
    from engine.sequence import Sequence as EngineSequence
    from engine.sequence import SequenceKey
    from modelfiles.model import open_model

    files = open_model(model)
    tokenizer = files.tokenizer()
    prompts = [
        tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", parse_special=True)
        for text in PROMPTS
    ]
    prompts = prompts[:: max(1, len(prompts) // num_prompts)][:num_prompts]

    def make(dtype: str, kv_dtype: str) -> Engine:
        return Engine(files, EngineConfig(dtype=dtype, kv_dtype=kv_dtype, max_sequences=64, prefix_cache=False))

    def sequence(name: str, tokens: Sequence[int]) -> EngineSequence:
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        key = SequenceKey(RequestId(name), 1, 0)
        return EngineSequence(key=key, sampling=sampling, tokens=list(tokens), num_prompt_tokens=len(tokens))

    def answers(engine: Engine) -> list[list[int]]:
        sequences = [sequence(f"{index}", tokens) for index, tokens in enumerate(prompts)]
        for each in sequences:
            engine.add(each)
        while engine.has_work:
            engine.step()
        return [each.tokens for each in sequences]

    @torch.inference_mode()
    def scores(engine: Engine, tokens: Sequence[int], num_prompt_tokens: int) -> Tensor:
        """Log probabilities ``[NUM_TOKENS, V]`` of the answer's tokens."""
        one = sequence("scored", tokens[:-1])
        one.block_table = engine.pool.allocate(engine.geometry.blocks_for(len(tokens) - 1))
        chunk = Chunk(sequence=one, start=0, num_tokens=len(tokens) - 1)
        model = engine.model
        batch = build_batch([chunk], engine.cache, num_heads=model.config.num_heads, row_multiple=model.row_multiple)
        hidden = model.forward(batch.tokens_T, batch.plan)
        engine.pool.free(one.block_table)
        return torch.log_softmax(model.logits(hidden[num_prompt_tokens - 1 : len(tokens) - 1]), -1)

    reference = make("float32", "float32")
    expected = answers(reference)
    pairs = list(zip(expected, prompts, strict=True))
    wanted = [scores(reference, tokens, len(prompt)) for tokens, prompt in pairs]
    del reference
    results = []
    for dtype, kv_dtype in dtypes:
        engine = make(dtype, kv_dtype)
        kls, same = [], 0
        for (tokens, prompt), want in zip(pairs, wanted, strict=True):
            got = scores(engine, tokens, len(prompt))
            kls.append((want.exp() * (want - got)).sum(-1))
            same += int((got.argmax(-1) == want.argmax(-1)).sum())
        kl = torch.cat(kls)
        own = answers(engine)
        results.append(
            Quality(
                dtype=dtype,
                kv_dtype=kv_dtype,
                kl=kl.mean().item(),
                max_kl=kl.max().item(),
                same_choice=same / len(kl),
                same_answers=sum(mine == theirs for mine, theirs in zip(own, expected, strict=True)) / len(own),
            )
        )
        del engine
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.quality", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    options = parser.parse_args()
    set_worker_environment(1)  # before torch
    dtypes = [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("int8", "float32"), ("int8", "bfloat16")]
    for quality in measure_quality(options.model, dtypes):
        print(quality)


if __name__ == "__main__":
    main()
