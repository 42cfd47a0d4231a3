"""Renders a model's chat template and turns the result into ids in which user text never becomes a control token.

The template is the model author's code, so it runs in Jinja's immutable sandbox and its output is bounded. The
strings a user supplies are marked before rendering: a noncharacter is put inside everything in them that could
complete a special token, also together with the template's own text. Special tokens are then parsed only where no
mark interrupts them, and the marks are dropped. Harmless content carries no marks and gives exactly the ids of the
reference implementation.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox

from modelfiles.added_texts import AddedTexts
from modelfiles.chat_messages import ChatMessage, ChatTool
from modelfiles.errors import ModelFileError
from modelfiles.tokenizer import Tokenizer

MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
"""Unicode noncharacters, reserved for internal use; the first one absent from the input is the mark."""

_WORDS = """
type properties required description enum items anyOf oneOf allOf additionalProperties title default format const
minimum maximum minItems maxItems minLength maxLength pattern nullable examples
object array string number integer boolean null function
none minimal low medium high xhigh max
"""
TEMPLATE_WORDS = frozenset(_WORDS.split())
"""What JSON schemas and the choices of a template are made of. Templates look them up and compare them."""

_MARK = re.compile(f"[{MARKS[0]}-{MARKS[-1]}]")
_ESCAPES = re.compile(r"\\(?:u(fd[de][0-9a-f])|.)")
"""Escapes of JSON, those of marks apart."""

MAX_EXPANSION_CHARS = 1 << 20
MAX_RENDER_S = 5.0


class TemplateError(ValueError):
    """The template refused this conversation, or could not render it. The message may be shown to the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    text: str
    token_ids: tuple[int, ...]


class ChatTemplate:
    """A compiled chat template. Safe to call from several threads."""

    def __init__(self, source: str, path: str, *, bos_text: str = "", eos_text: str = "") -> None:
        self.source = source
        self.digest = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()
        self._variables = {"bos_token": bos_text, "eos_token": eos_text}
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
            """What it looks for from outside."""
        except jinja2.TemplateSyntaxError as error:
            raise ModelFileError(
                path, f"chat template does not parse (line {error.lineno}: {error.message})", "mend the template"
            ) from None

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[ChatTool] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] | None = None,
        add_special_tokens: bool = False,
    ) -> RenderedChat:
        """Renders and tokenises. Raises `TemplateError` for what the template refuses."""
        given = [message.turn(_unmarked) for message in messages], [tool.value() for tool in tools or ()], variables
        guard = _Guard(tokenizer.added, given)
        values = {key: guard.words(value) for key, value in (variables or {}).items()}
        values |= {
            "messages": [message.turn(guard.value) for message in messages],
            "tools": None if tools is None else [tool.value(guard.words) for tool in tools],
            "add_generation_prompt": add_generation_prompt,
        }
        marked = self.render(values, limit=MAX_EXPANSION_CHARS + 4 * guard.num_chars)
        if continue_final_message:
            marked = _cut_after_last(marked, guard.text(messages[-1].content or "").strip())
        token_ids = tokenizer.encode_marked(marked, guard.mark)
        if add_special_tokens:
            token_ids = tokenizer.encode("", parse_special=True, add_special_tokens=True) + token_ids
        return RenderedChat(text=marked.replace(guard.mark, ""), token_ids=tuple(token_ids))

    def render(self, values: Mapping[str, object], *, limit: int = MAX_EXPANSION_CHARS) -> str:
        """The text of the template for these variables, unguarded."""
        values = {"documents": None, **values, **self._variables}
        pieces: list[str] = []
        num_chars = 0
        deadline = time.monotonic() + MAX_RENDER_S
        try:
            for piece in self._template.generate(values):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > limit or time.monotonic() > deadline:
                    raise TemplateError("the chat template's output is too large for this conversation")
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refused the conversation: {error}"[:500]) from None
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            if isinstance(error, TemplateError):
                raise
            raise TemplateError("the chat template cannot render this conversation") from None
        return "".join(pieces)


class _Guard:
    """Marks everything in user text that could be read as (a part of) an added token once rendered."""

    def __init__(self, added: AddedTexts, given: object) -> None:
        whole_input = json.dumps(given, ensure_ascii=False)
        self.num_chars = len(whole_input)
        self.mark = next((mark for mark in MARKS if mark not in whole_input), "")
        if not self.mark:
            raise TemplateError("the conversation holds every Unicode noncharacter; remove some of them")
        self._added = added

    def text(self, value: str) -> str:
        """Case is ignored because a template may change it after the marking."""
        if not value:
            return value
        pieces: list[str] = []
        position = 0
        for start in self._added.starts(value):
            pieces.append(value[position : start + 1])
            position = start + 1
        marked = self.mark.join([*pieces, value[position:]])
        is_inside = self._added.is_inside_one(value)
        if is_inside or self._added.begins_with_a_tail(value):
            marked = self.mark + marked
        if is_inside or self._added.ends_with_a_head(value):
            marked += self.mark
        return marked

    def value(self, value: object) -> object:
        """Every text in a value, the names of members included."""
        return self._each(value, self.text)

    def words(self, value: object) -> object:
        """The same, but for words that templates look for (`tool.parameters.type`): they are not the user's."""
        return self._each(value, lambda text: text if text in TEMPLATE_WORDS else self.text(text))

    def _each(self, value: object, mark: Callable[[str], str]) -> object:
        if isinstance(value, str):
            return mark(value)
        if isinstance(value, list):
            return [self._each(one, mark) for one in value]
        if isinstance(value, Mapping):
            return {mark(key): self._each(one, mark) for key, one in value.items()}
        return value


def _unmarked(value: object) -> object:
    return value


def _cut_after_last(text: str, final: str) -> str:
    position = text.rfind(final)
    if not final or position < 0:
        raise TemplateError("the chat template does not keep the final message, so it cannot be continued")
    return text[: position + len(final)]


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As the reference implementation has it. Marks do not count in the order of keys, and are never escaped: they
    would not be found again."""
    value = _sorted(value) if sort_keys else value
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators)
    return _ESCAPES.sub(lambda found: chr(int(found[1], 16)) if found[1] else found[0], text) if ensure_ascii else text


def _sorted(value: object) -> object:
    if isinstance(value, list):
        return [_sorted(one) for one in value]
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value, key=lambda key: _MARK.sub("", key))}
    return value


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
