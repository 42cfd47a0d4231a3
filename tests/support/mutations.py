"""Valid bodies of every route, and seeded ways to spoil them: what a client may send by mistake or on purpose."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

HI: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": "yes?", "name": "a"},
    {"role": "user", "content": "more \U0001f999"},
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"type": "array", "items": {"enum": [1, None]}}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"name": "f", "description": "does", "parameters": SCHEMA, "strict": False}
SAMPLING: dict[str, Any] = {
    "model": "m",
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.5, "7": -100},
    "allowed_token_ids": [5, 6],
    "bad_words": ["x"],
    "seed": 7,
    "stop": ["zz", "yy"],
    "stop_token_ids": [9],
    "min_tokens": 1,
    "ignore_eos": False,
    "priority": 0,
    "cache_salt": "s",
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "stream": True,
}
GENERATION: dict[str, Any] = {
    **SAMPLING,
    "n": 2,
    "max_tokens": 20,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "return_token_ids": True,
    "user": "u",
}
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {**GENERATION, "messages": HI, "logprobs": True, "top_logprobs": 1}),
    (
        "/v1/chat/completions",
        {"model": "m", "messages": HI, "max_completion_tokens": 20, "chat_template_kwargs": {"a": 1}},
    ),
    (
        "/v1/chat/completions",
        {
            "model": "m",
            "messages": HI,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "m",
            "messages": [
                *HI,
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "5"},
            ],
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
        },
    ),
    ("/v1/completions", {**GENERATION, "prompt": "say it", "logprobs": 1, "best_of": 2}),
    ("/v1/completions", {"model": "m", "prompt": ["a", "b"], "echo": True, "max_tokens": 3, "suffix": None}),
    ("/v1/completions", {"model": "m", "prompt": [[5, 6], [7]], "max_tokens": 3, "guided_json": SCHEMA}),
    ("/v1/completions", {"model": "m", "prompt": [5, 6], "structured_outputs": {"choice": ["a", "b"]}}),
    ("/v1/completions", {"model": "m", "prompt": "x", "truncate_prompt_tokens": 1, "truncation_side": "left"}),
    (
        "/v1/responses",
        {
            **SAMPLING,
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "yes"}],
                    "id": "m1",
                },
                {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"role": "assistant", "content": "so"},
                {"role": "user", "content": "more"},
            ],
            "instructions": "Be brief.",
            "max_output_tokens": 20,
            "text": {
                "format": {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True},
                "verbosity": "low",
            },
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
            "metadata": {"a": "b"},
            "stream_options": {"include_obfuscation": False},
            "store": False,
        },
    ),
    (
        "/v1/responses",
        {
            "model": "m",
            "input": [
                {"role": "user", "content": "hi"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "5"}]},
            ],
            "tools": [{"type": "function", **TOOL}],
            "tool_choice": {"type": "function", "name": "f"},
            "parallel_tool_calls": False,
            "reasoning": {"effort": None},
        },
    ),
    ("/v1/responses", {"model": "m", "input": "hi", "stream": True}),
    ("/tokenize", {"model": "m", "prompt": "say it", "add_special_tokens": True, "return_token_strs": True}),
    ("/tokenize", {"model": "m", "messages": HI, "add_generation_prompt": True, "chat_template_kwargs": {"a": [1]}}),
    ("/detokenize", {"model": "m", "tokens": [5, 6, 7]}),
)

ODD_TEXTS = (
    "",
    " ",
    "\x00",
    "\ufeff",
    "\ufffd",
    "\u202e\u2066",
    "e\u0301" * 50,
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "<|im_end|><|im_start|>system",
    "{{ 1/0 }}{% for %}",
    "'; DROP TABLE keys; --",
    "../../etc/passwd",
    "%s%n%x",
    "a" * 5000,
    "NaN",
    "null",
    "true",
    "5",
    "function",
    "json_schema",
)
ODD_NUMBERS = (
    0,
    -1,
    1,
    2,
    0.5,
    -0.0,
    1e-320,
    1e308,
    -1e308,
    2**31,
    2**53 + 1,
    2**63 - 1,
    2**63,
    -(2**63) - 1,
    2**64,
    10**40,
)
ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"": None},
    "x",
    5,
    1.5,
    [1, "a", None],
    {"type": "x"},
    [{}],
    ["x"] * 300,
)
ODD_LITERALS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    "0123",
    "0x10",
    "+1",
    ".5",
    "1.",
    "True",
    "undefined",
)
ODD_TYPES = (
    "text/plain",
    "",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "application/xml",
    "a/b/c",
    "application/json; charset=utf-16",
    "application/problem+json",
    "APPLICATION/JSON",
)
MARK = "@@literal@@"


@dataclass
class Mutant:
    path: str
    raw: bytes
    headers: dict[str, str] = field(default_factory=dict)
    method: str = "POST"
    kinds: list[str] = field(default_factory=list)


class Mutator:
    """Draws one mutant after the other; the same seed draws the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draw(self) -> Mutant:
        path, body = self._random.choice(BODIES)
        value = json.loads(json.dumps(body))
        mutant = Mutant(path, b"")
        for _ in range(self._random.choice((1, 1, 1, 2, 3))):
            change = self._random.choice(self._CHANGES)
            mutant.kinds.append(change.__name__)
            change(self, value)
        text = json.dumps(value, ensure_ascii=self._random.random() < 0.5)
        text = text.replace(f'"{MARK}"', self._random.choice(ODD_LITERALS))
        mutant.raw = text.encode("utf-8", "surrogatepass")
        if self._random.random() < 0.15:
            change_raw = self._random.choice(self._RAW)
            mutant.kinds.append(change_raw.__name__)
            mutant.raw = change_raw(self, mutant.raw)
        if self._random.random() < 0.03:
            mutant.headers["content-type"] = self._random.choice(ODD_TYPES)
        if self._random.random() < 0.02:
            mutant.path = self._random.choice(BODIES)[0]
        if self._random.random() < 0.01:
            mutant.method = self._random.choice(("GET", "PUT", "DELETE", "OPTIONS", "PATCH", "HEAD"))
        return mutant

    # -- of the value -------------------------------------------------------------------------------------------------

    def _places(self, value: Any) -> list[tuple[Any, Any]]:
        """Every (container, key) in the value."""
        found: list[tuple[Any, Any]] = []
        waiting = [value]
        while waiting:
            one = waiting.pop()
            keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
            for key in keys:
                found.append((one, key))
                waiting.append(one[key])
        return found

    def _place(self, value: Any) -> tuple[Any, Any]:
        places = self._places(value)
        return self._random.choice(places) if places else ({"": None}, "")

    def _other_type(self, value: Any) -> None:
        here, key = self._place(value)
        here[key] = json.loads(json.dumps(self._random.choice(ODD_VALUES)))

    def _odd_number(self, value: Any) -> None:
        numbers = [(here, key) for here, key in self._places(value) if isinstance(here[key], int | float)]
        here, key = self._random.choice(numbers) if numbers else self._place(value)
        here[key] = self._random.choice(ODD_NUMBERS)

    def _odd_text(self, value: Any) -> None:
        texts = [(here, key) for here, key in self._places(value) if isinstance(here[key], str)]
        here, key = self._random.choice(texts) if texts else self._place(value)
        here[key] = self._random.choice(ODD_TEXTS)

    def _lone_surrogate(self, value: Any) -> None:
        here, key = self._place(value)
        here[key] = "a\ud800b"

    def _literal(self, value: Any) -> None:
        here, key = self._place(value)
        here[key] = MARK

    def _nested(self, value: Any) -> None:
        here, key = self._place(value)
        inner = here[key]
        for _ in range(self._random.choice((1, 3, 40, 70, 300))):
            inner = [inner] if self._random.random() < 0.5 else {"a": inner}
        here[key] = inner

    def _without(self, value: Any) -> None:
        here, key = self._place(value)
        if isinstance(here, dict):
            here.pop(key, None)
        else:
            del here[key]

    def _renamed(self, value: Any) -> None:
        members = [(here, key) for here, key in self._places(value) if isinstance(here, dict)]
        if members:
            here, key = self._random.choice(members)
            here[self._random.choice([name for _, body in BODIES for name in body])] = here.pop(key)

    def _borrowed(self, value: Any) -> None:
        """A member of another route's body."""
        name, member = self._random.choice([pair for _, body in BODIES for pair in body.items()])
        if isinstance(value, dict):
            value[name] = json.loads(json.dumps(member))

    def _many(self, value: Any) -> None:
        lists = [here[key] for here, key in self._places(value) if isinstance(here[key], list) and here[key]]
        if lists:
            one = self._random.choice(lists)
            one += json.loads(json.dumps(one[:1])) * self._random.choice((1, 5, 40))

    _CHANGES: tuple[Callable[[Mutator, Any], None], ...] = (
        _other_type,
        _other_type,
        _odd_number,
        _odd_number,
        _odd_text,
        _lone_surrogate,
        _literal,
        _nested,
        _without,
        _renamed,
        _borrowed,
        _many,
    )

    # -- of the bytes -------------------------------------------------------------------------------------------------

    def _cut(self, raw: bytes) -> bytes:
        return raw[: self._random.randrange(len(raw) + 1)]

    def _flipped(self, raw: bytes) -> bytes:
        changed = bytearray(raw)
        for _ in range(self._random.choice((1, 2, 8))):
            changed[self._random.randrange(len(changed))] = self._random.randrange(256)
        return bytes(changed)

    def _doubled_member(self, raw: bytes) -> bytes:
        name, member = self._random.choice([pair for _, body in BODIES for pair in body.items()])
        return raw[:-1] + b"," + json.dumps({name: member}).encode()[1:-1] + b"}"

    def _repeated(self, raw: bytes) -> bytes:
        return raw + self._random.choice((b"", b"\n", b",", b"]", b"}")) + raw

    def _other_encoding(self, raw: bytes) -> bytes:
        encoding = self._random.choice(("utf-16", "utf-32", "utf-8-sig", "latin-1"))
        return raw.decode("utf-8", "replace").encode(encoding, "replace")

    def _wrapped(self, raw: bytes) -> bytes:
        return self._random.choice((b"[%s]", b'{"a":%s}', b'"%s"', b"/* */%s", b"%s//")) % raw

    def _large(self, raw: bytes) -> bytes:
        return raw + b" " * self._random.choice((1000, 40_000, 300_000))

    _RAW: tuple[Callable[[Mutator, bytes], bytes], ...] = (
        _cut,
        _cut,
        _flipped,
        _flipped,
        _doubled_member,
        _repeated,
        _other_encoding,
        _wrapped,
        _large,
    )
