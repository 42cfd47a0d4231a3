"""Asks an OpenAI endpoint for one streamed answer."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import orjson

from bench.client.http import HttpClient
from bench.client.prompts import Ids, Words
from bench.client.record import AnswerReader, Record, num_meant
from bench.client.scripts import Script
from core.errors import ConfigError


class Route(StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Route.CHAT else "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """What is the same in all requests of a run."""

    model: str
    route: Route = Route.COMPLETIONS
    words: Words | Ids = field(default_factory=Words)
    is_exact: bool = True
    """Answers have exactly the tokens that the workload means (``ignore_eos``, known to vLLM, SGLang, llama.cpp and
    Baton); otherwise at most so many."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Members added to each body; they replace ours."""
    timeout_s: float = 600.0


class Endpoint:
    def __init__(self, client: HttpClient, asking: Asking) -> None:
        if asking.route is Route.CHAT and isinstance(asking.words, Ids):
            raise ConfigError("chat takes text: use --prompts text, or --endpoint completions for token ids")
        self._client = client
        self._asking = asking

    def body(self, script: Script, line: int, said: "Said") -> bytes:
        """The request of one line behind what was said before. Made ahead of its time: it takes a moment."""
        asking = self._asking
        is_last = line + 1 == len(script.lines)
        body: dict[str, object] = {
            "model": asking.model,
            **said.prompt(script, line, asking),
            "max_tokens": script.lines[line].max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if asking.is_exact:
            body |= {"ignore_eos": True, "min_tokens": script.lines[line].max_tokens}
        if isinstance(asking.words, Ids) and not is_last:
            body["return_token_ids"] = True
        return orjson.dumps(body | dict(asking.extra))

    async def ask(self, script: Script, line: int, body: bytes, *, due_at: float) -> Record:
        """Whatever becomes of it is in the record."""
        record = Record(label=script.label, due_at=due_at, num_prompt_tokens=num_meant(script, line))
        reader = AnswerReader(record)
        record.sent_at = time.perf_counter()
        status = 0
        try:
            async with asyncio.timeout(self._asking.timeout_s):
                status = await self._client.post(self._asking.route.path, body, reader.feed)
        except TimeoutError:
            record.error = f"timeout: not answered within {self._asking.timeout_s:g} s"
        except OSError as error:
            record.error = f"connection: {error}"
        reader.end(status)
        return record


class Said:
    """What a conversation's prompts repeat: earlier lines and the answers to them, as they really were."""

    def __init__(self) -> None:
        self._answers: list[Record] = []

    def answered(self, record: Record) -> None:
        self._answers.append(record)

    def prompt(self, script: Script, line: int, asking: Asking) -> dict[str, object]:
        words, lines = asking.words, script.lines[: line + 1]
        if isinstance(words, Ids):
            ids = words.ids(script.system)
            for number, each in enumerate(lines):
                ids = ids + words.ids(each.parts) + (self._answers[number].token_ids if number < line else [])
            return {"prompt": ids}
        if asking.route is Route.COMPLETIONS:
            text = words.text(script.system)
            for number, each in enumerate(lines):
                text += words.text(each.parts) + (self._answers[number].text if number < line else "")
            return {"prompt": text}
        messages = [{"role": "system", "content": words.text(script.system)}] if script.system else []
        for number, each in enumerate(lines):
            messages.append({"role": "user", "content": words.text(each.parts)})
            if number < line:
                messages.append({"role": "assistant", "content": self._answers[number].text})
        return {"messages": messages}


async def first_model(client: HttpClient) -> str:
    """The name of the first model that the server lists. Raises ConfigError that says what to name."""
    try:
        status, content = await client.get("/v1/models")
        name = orjson.loads(content)["data"][0]["id"] if status == 200 else None
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"cannot ask the server for its models ({error}): is --url right? Or name --model") from None
    if not isinstance(name, str):
        raise ConfigError(f"the server does not list its models (http {status}): name --model, or give --key-file")
    return name
