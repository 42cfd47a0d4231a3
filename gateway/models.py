"""The models this gateway can speak for: tokenizer, template and limits. No weights."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from core.config import GenerationConfig, ModelConfigSection
from core.errors import ModelNotFound
from core.types import ExecutionKind
from gateway.access.caller import Caller
from gateway.tools.dialect import Dialect, dialect_of
from modelfiles import ChatMessage, ChatTemplate, GenerationDefaults, TemplateError, Tokenizer, open_model

NUM_TEXT_THREADS = 2
PROBE = "what a user said"
SMALL_BODY_BYTES = 2048
"""About 400 tokens: template and tokenizer take 0.3 ms."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: GenerationDefaults
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dialect: Dialect = field(default_factory=Dialect)
    """How it is told of tools and how it writes calls."""
    has_priorities: bool = False
    """Its pools serve the lowest ``priority`` first."""
    execution: ExecutionKind = ExecutionKind.REAL
    """``mock``: nothing that it answers comes from a model."""
    created: int
    """Unix time of this gateway's start, for the model list."""

    @property
    def template_variables(self) -> frozenset[str]:
        return frozenset() if self.template is None else self.template.variables

    @classmethod
    def load(cls, section: ModelConfigSection) -> "ServedModel":
        """Reads the text side of a model's files. Raises ConfigError with the remedy."""
        files = open_model(section.path)
        own = files.config.max_context
        tokenizer, template = files.tokenizer(), files.chat_template()
        _ = tokenizer.json_texts  # made now, not before the first answer
        if template is not None:
            _remember(template, tokenizer)
        return cls(
            name=section.name,
            tokenizer=tokenizer,
            template=template,
            dialect=dialect_of(template, tokenizer, tool_format=section.tool_format, reasoning=section.reasoning),
            defaults=_configured(section.generation).or_else(files.generation_defaults),
            max_context=own if section.max_context == "auto" else min(own, section.max_context),
            vocab_size=files.config.vocab_size,
            eos_token_ids=files.config.eos_token_ids,
            has_priorities=any(pool.policy == "priority" for pool in section.pools.values()),
            execution=section.execution.kind,
            created=int(time.time()),
        )


def _remember(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    """What the template itself writes need not be tokenised for each request."""
    try:
        rendered = template.encode(tokenizer, [ChatMessage(role="user", content=PROBE)])
    except TemplateError:
        return  # it wants other conversations than this one
    tokenizer.remember(rendered.text, PROBE)


def _configured(section: GenerationConfig) -> GenerationDefaults:
    """What the operator says; ``auto`` is silent."""
    said = {name: value for name, value in section.model_dump().items() if value != "auto"}
    return GenerationDefaults(**said)


class VisibleModels:
    """The models that exist for one caller. Another tenant's are as if they were not served at all."""

    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        self._models = models

    def get(self, name: str) -> ServedModel:
        model = self._models.get(name)
        if model is None:
            raise ModelNotFound(f"the model does not exist; served: {', '.join(self._models)}", param="model")
        return model

    def only(self, name: str | None) -> ServedModel:
        """The named model, or the first one where a route lets the name be absent."""
        return self.get(name if name is not None else next(iter(self._models), ""))

    def all(self) -> tuple[ServedModel, ...]:
        return tuple(self._models.values())


class ModelShelf:
    """All served models, and the threads on which text work is done (off the event loop)."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self._models = {model.name: model for model in models}
        self._threads = ThreadPoolExecutor(NUM_TEXT_THREADS, thread_name_prefix="text")

    def seen_by(self, caller: Caller) -> VisibleModels:
        allowed = caller.models
        if allowed is None:
            return VisibleModels(self._models)
        return VisibleModels({name: model for name, model in self._models.items() if name in allowed})

    async def run(self, work: Callable[[], T], *, num_bytes: int) -> T:
        """Runs text work on a body of `num_bytes`, in a thread unless it is small: Python's lock is held for nearly all
        of it, so that for a fraction of a millisecond a thread only adds the changes of hands. The result of a thread
        is dropped if the caller is cancelled meanwhile."""
        if num_bytes <= SMALL_BODY_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
