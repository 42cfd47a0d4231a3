"""Builds a Rust tokenizer from the tokenizer metadata of a GGUF file.

`gpt2`: byte-level BPE. Pre-tokenizers follow llama.cpp's table of `tokenizer.ggml.pre` names; a name that is not here
is refused, because a wrong split of the text gives wrong ids without any error.

`llama`: SentencePiece BPE with byte fallback. Its files have no merges but a score for each piece: the pair whose
joined piece scores best is joined first, so every way to cut a piece in two is a merge, ranked by the score.
"""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from modelfiles.errors import ModelFileError
from modelfiles.gguf_file import GGUFFile

REMEDY = "use the model's Hugging Face folder"

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Token types of llama.cpp: control tokens are special; user-defined ones are matched whole but shown."""

SPACE = "\u2581"
"""What SentencePiece writes for a space."""

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def tokenizer_from_gguf(file: GGUFFile) -> tokenizers.Tokenizer:
    tokens = file.strings("tokenizer.ggml.tokens")
    types = file.value("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelFileError(str(file.path), "token types are missing or do not match the tokens", REMEDY)
    match file.value("tokenizer.ggml.model"):
        case "gpt2":
            built = _byte_level(file, tokens)
            marked = list(range(len(tokens)))
        case "llama":
            built = _sentence_piece(file, tokens, types)
            # Runs of white space are joined by merges: as marked tokens they would never be found among SPACEs.
            marked = [index for index, token in enumerate(tokens) if not token.isspace()]
        case model:
            raise ModelFileError(str(file.path), f"tokenizer model {model!r} is not supported", REMEDY)
    built.add_special_tokens(
        [AddedToken(tokens[one], special=True, normalized=False) for one in marked if types[one] == CONTROL]
    )
    built.add_tokens([AddedToken(tokens[one], normalized=False) for one in marked if types[one] == USER_DEFINED])
    bos = file.value("tokenizer.ggml.bos_token_id")
    if file.value("tokenizer.ggml.add_bos_token") is True and isinstance(bos, int) and 0 <= bos < len(tokens):
        built.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return built


def _byte_level(file: GGUFFile, tokens: list[str]) -> tokenizers.Tokenizer:
    pairs = [tuple(line.split(" ", 1)) for line in file.strings("tokenizer.ggml.merges")]
    merges = [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]
    known = set(tokens)
    for left, right in merges:
        if not {left, right, left + right} <= known:
            raise ModelFileError(str(file.path), f"merges {left!r} and {right!r}, which are not all tokens", REMEDY)
    pre = file.value("tokenizer.ggml.pre")
    built = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre == "llama-bpe",
        )
    )
    built.pre_tokenizer = _pre_tokenizer(str(pre), str(file.path))
    built.decoder = decoders.ByteLevel()
    return built


def _sentence_piece(file: GGUFFile, tokens: list[str], types: list[object]) -> tokenizers.Tokenizer:
    scores = file.value("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelFileError(str(file.path), "token scores are missing or do not match the tokens", REMEDY)
    unknown = file.value("tokenizer.ggml.unknown_token_id")
    has_prefix = file.value("tokenizer.ggml.add_space_prefix") is not False
    pieces = [token.replace(" ", SPACE) if token.isspace() else token for token in tokens]
    built = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=_merges(pieces, types, scores),
            unk_token=tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", SPACE)
    built.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if has_prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return built


def _merges(pieces: list[str], types: list[object], scores: list[float]) -> list[tuple[str, str]]:
    """Every cut of a piece into two, best piece first; pieces of the user's own go before all scores."""
    known = set(pieces)
    ranked: list[tuple[float, int, int, str, str]] = []
    for index, piece in enumerate(pieces):
        kind = types[index]
        if kind == NORMAL or (kind == USER_DEFINED and piece.replace(SPACE, " ").isspace()):
            rank = -scores[index] if kind == NORMAL else -1.0
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in known and right in known:
                    ranked.append((rank, len(piece) if kind == USER_DEFINED else 0, -cut, left, right))
    ranked.sort()
    return [(left, right) for _, _, _, left, right in ranked]


def _pre_tokenizer(name: str, path: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    match name:
        case "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone":
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        case "gpt-2" | "phi-2" | "mpt" | "olmo":
            return byte_level
        case "llama-bpe" | "qwen2":
            split = _LLAMA3_SPLIT if name == "llama-bpe" else _QWEN2_SPLIT
            return pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(split), behavior="isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
    raise ModelFileError(path, f"pre-tokenizer {name!r} is not supported", REMEDY)
