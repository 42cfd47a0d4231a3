"""A streamed completion, read event by event."""

import json
from collections.abc import Callable
from typing import Any, Self

from tests.support.cluster import MODEL, ProcessCluster

PROMPT = "The village had a baker, a smith and"
NUM_TOKENS = 40


class Stream:
    """A streamed completion, read as it comes."""

    def __init__(self, cluster: ProcessCluster, **fields: Any) -> None:
        self._body = {
            "model": MODEL,
            "prompt": PROMPT,
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        self._cluster = cluster
        self.text = ""
        self.token_ids: list[int] = []
        self.usage: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None
        self.finish_reason: str | None = None

    async def read(self, *, on_tokens: int | None = None, then: Callable[[], object] | None = None) -> Self:
        """To the end; ``then()`` is called once, when ``on_tokens`` tokens have come."""
        async with self._cluster.http.stream("POST", "/v1/completions", json=self._body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    self.error = event["error"]
                    continue
                self.usage = event.get("usage") or self.usage
                for choice in event["choices"]:
                    before = self.text
                    self.text += choice["text"]
                    assert self.text.startswith(before)
                    self.token_ids += choice.get("token_ids") or []
                    self.finish_reason = choice["finish_reason"] or self.finish_reason
                if then is not None and on_tokens is not None and len(self.token_ids) >= on_tokens:
                    then()
                    then = None
        return self
