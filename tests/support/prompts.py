"""Prompts of every awkward length and kind, for the default model."""

from modelfiles.tokenizer import Tokenizer

BLOCK = 16
_STORY = (
    "Once upon a time there was a small village at the foot of a mountain, and in it lived a baker, a smith and a teacher. "
    "Every morning the baker rose before the sun to knead the dough, while the smith slept and the teacher dreamt of far "
    "countries. One day a stranger came with a cart full of clocks, and none of them told the same time. "
)


def of_length(tokenizer: Tokenizer, num_tokens: int, *, start: int = 0) -> list[int]:
    """Exactly so many tokens of running text."""
    tokens: list[int] = tokenizer.encode(_STORY * (2 + (start + num_tokens) // 80), parse_special=False)
    assert len(tokens) >= start + num_tokens
    return tokens[start : start + num_tokens]


def awkward(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Name -> token ids. One token; around a block; around chunks; 2,000 tokens; emoji, CJK, code, right to left."""

    def text(content: str) -> list[int]:
        ids: list[int] = tokenizer.encode(content, parse_special=False)
        return ids

    lengths = (
        1,
        2,
        BLOCK - 1,
        BLOCK,
        BLOCK + 1,
        2 * BLOCK - 1,
        2 * BLOCK,
        2 * BLOCK + 1,
        127,
        256,
        257,
        513,
        700,
        2000,
    )
    prompts = {f"{n} tokens": of_length(tokenizer, n, start=3 * i) for i, n in enumerate(lengths)}
    prompts |= {
        "question": text("Question: What is the capital of France?\nAnswer:"),
        "emoji": text("Emoji story: 🦊🦙👩‍👩‍👧🚀🚀 and then"),
        "cjk": text("日本の首都は東京です。フランスの首都は"),
        "code": text("def fibonacci(n):\n    if n < 2:\n        return n\n    return"),
        "arabic": text("عاصمة فرنسا هي"),
        "list": text("1. apples\n2. pears\n3. plums\n4."),
        "whitespace": text("   \n\n\t  x"),
        "repetition": text("la la la la la la la la"),
    }
    return prompts
