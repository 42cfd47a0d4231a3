"""Builds a Rust tokenizer from the tokenizer metadata of a GGUF file (byte-level BPE only).

Pre-tokenizers follow llama.cpp's table of `tokenizer.ggml.pre` names; a name that is not here is refused, because a
wrong split of the text gives wrong ids without any error.
"""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from modelfiles.errors import ModelFileError
from modelfiles.gguf_file import GGUFFile

REMEDY = "use the model's Hugging Face folder"

CONTROL, USER_DEFINED = 3, 4
"""Token types of llama.cpp: control tokens are special; user-defined ones are matched whole but shown."""

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def tokenizer_from_gguf(file: GGUFFile) -> tokenizers.Tokenizer:
    model = file.value("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelFileError(str(file.path), f"tokenizer model {model!r} is not supported", REMEDY)
    tokens = file.strings("tokenizer.ggml.tokens")
    pairs = [tuple(line.split(" ", 1)) for line in file.strings("tokenizer.ggml.merges")]
    merges = [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]
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
    _add_marked_tokens(built, file, tokens)
    bos = file.value("tokenizer.ggml.bos_token_id")
    if file.value("tokenizer.ggml.add_bos_token") is True and isinstance(bos, int):
        built.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return built


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


def _add_marked_tokens(built: tokenizers.Tokenizer, file: GGUFFile, tokens: list[str]) -> None:
    types = file.value("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelFileError(str(file.path), "token types are missing or do not match the tokens", REMEDY)
    marked = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)]
    for token, kind in marked:
        added = AddedToken(token, special=kind == CONTROL, normalized=False)
        if kind == CONTROL:
            built.add_special_tokens([added])
        else:
            built.add_tokens([added])
