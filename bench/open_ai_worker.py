"""An OpenAI endpoint that computes nothing, for routers that want such workers: the first token at once, then one every
``1 / --tokens-per-s`` seconds. ``python -m bench.open_ai_worker``; its URL is told on standard output.
"""

import argparse
import asyncio
import json
import sys

import httptools
import uvloop

MODEL = "nothing"
_EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"nothing","choices":'
    b'[{"index":0,"delta":{"content":" river"},"finish_reason":null}]}\n\n'
)
_LAST = _EVENT.replace(b'"finish_reason":null', b'"finish_reason":"length"')
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Connection(asyncio.Protocol):
    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self._body = b""
        self._path = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    # -- callbacks of the parser --------------------------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        self._path, self._body = url, b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._path.endswith(b"/completions"):
            self._transport.write(_HEAD)
            self._tick(int(json.loads(self._body).get("max_tokens") or 16))
            return
        known = {"object": "list", "data": [{"id": MODEL, "object": "model"}], "model_path": MODEL, "status": "ok"}
        content = json.dumps(known).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        self._transport.write(head.encode() + content)

    def _tick(self, left: int) -> None:
        if self._transport.is_closing():
            return
        event = _EVENT if left > 1 else _LAST + b"data: [DONE]\n\n"
        self._transport.write(b"%x\r\n%s\r\n%s" % (len(event), event, b"" if left > 1 else b"0\r\n\r\n"))
        if left > 1:
            asyncio.get_running_loop().call_later(self._gap_s, self._tick, left - 1)


async def serve(tokens_per_s: float) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Connection(1 / tokens_per_s), "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.open_ai_worker", description=__doc__)
    parser.add_argument("--tokens-per-s", type=float, default=20.0)
    uvloop.run(serve(parser.parse_args().tokens_per_s))
    return 0


if __name__ == "__main__":
    sys.exit(main())
