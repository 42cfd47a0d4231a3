"""``baton chat``: one question over HTTP, the answer as it comes, then where the time went."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx

from core.errors import ConfigError, InternalError

API_KEY = "BATON_API_KEY"
BAR_WIDTH = 40
READ_TIMEOUT_S = 600


@dataclass(slots=True)
class _Outcome:
    """What the end of the stream said."""

    timing: dict[str, object] = field(default_factory=dict)
    finish_reason: str = ""
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0


async def chat(
    url: str, message: str, *, key: str | None, model: str | None, max_tokens: int, temperature: float
) -> int:
    """Print the answer and its timing. Raises ConfigError when there is no gateway, InternalError when it fails."""
    timeout = httpx.Timeout(10, read=READ_TIMEOUT_S)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, timeout=timeout, headers=headers, trust_env=False) as client:
        try:
            body = {
                "model": model or await _first_model(client),
                "messages": [{"role": "user", "content": message}],
                "max_tokens": max_tokens,
                "temperature": temperature,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            outcome = _Outcome()
            async for text in _stream(client, body, outcome):
                print(text, end="", flush=True)
        except httpx.ConnectError:
            raise ConfigError(
                f"no gateway answers at {url}: start a cluster with `baton up`, or name it: --url"
            ) from None
        except httpx.HTTPError as error:
            raise InternalError(f"the connection to {url} broke: {error or type(error).__name__}") from None
    print()
    print(render_timing(outcome))
    return 0


async def _first_model(client: httpx.AsyncClient) -> str:
    answer = await client.get("/v1/models")
    _raise_for_error(answer.status_code, answer.content)
    return str(answer.json()["data"][0]["id"])


async def _stream(client: httpx.AsyncClient, body: object, outcome: _Outcome) -> AsyncIterator[str]:
    """The pieces of the answer; what else the chunks say goes into ``outcome``."""
    headers = {"x-baton-timing": "1"}
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        if answer.status_code != httpx.codes.OK:
            _raise_for_error(answer.status_code, await answer.aread())
        async for line in answer.aiter_lines():
            data = line.removeprefix("data: ")
            if data == line or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise InternalError(chunk["error"]["message"])
            outcome.timing = chunk.get("timing") or outcome.timing
            if usage := chunk.get("usage"):
                outcome.num_prompt_tokens = usage["prompt_tokens"]
                outcome.num_completion_tokens = usage["completion_tokens"]
            for choice in chunk["choices"]:
                outcome.finish_reason = choice["finish_reason"] or outcome.finish_reason
                yield choice["delta"].get("content") or ""


def _raise_for_error(status: int, content: bytes) -> None:
    """Raises the gateway's own message."""
    if status == httpx.codes.OK:
        return
    try:
        message = json.loads(content)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"the gateway answered with HTTP status {status}"
    if status == httpx.codes.UNAUTHORIZED:
        raise ConfigError(f"{message}; set the environment variable {API_KEY}, or name a file: --key-file FILE")
    raise InternalError(str(message))


def render_timing(outcome: "_Outcome") -> str:
    """The stages of the request, a bar each; they sum to its total time."""
    timing = outcome.timing
    stages = timing.get("stages_ms")
    total_ms = _number(timing.get("total_ms"))
    lines = [
        f"{outcome.num_prompt_tokens} prompt tokens, {outcome.num_completion_tokens} answer tokens"
        f" ({outcome.finish_reason}), {total_ms:.0f} ms"
    ]
    if isinstance(stages, dict) and total_ms > 0:
        lines += [
            f"  {stage:<17}{_number(ms):9.1f} ms  {'#' * round(BAR_WIDTH * _number(ms) / total_ms)}"
            for stage, ms in stages.items()
        ]
    ttft = f"first token after {_number(timing.get('ttft_ms')):.0f} ms"
    rate = timing.get("tokens_per_s")
    lines.append(ttft if rate is None else f"{ttft}, then {_number(rate):.1f} tokens/s")
    if timing.get("mode") == "split":
        lines.append(
            f"prefill on {timing.get('prefill_worker')}, decode on {timing.get('decode_worker')}: "
            f"{_number(timing.get('transfer_bytes')) / 1024:.0f} KiB of KV by {timing.get('transfer_backend')} "
            f"in {_number(timing.get('transfer_ms')):.1f} ms"
        )
    elif timing:
        lines.append(f"prefill and decode on {timing.get('decode_worker')}")
    return "\n".join(lines)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
