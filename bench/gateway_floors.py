"""What the gateway's work would cost with nothing of ours around it, on this machine, now: see bench.gateway.

``python -m bench.gateway_floors NUM`` is a process that does nothing but send: to each of NUM clients one frame with
each tick, by plain calls of the kernel. Its port is told on standard output.
"""

import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

from core.config import load_config
from modelfiles import open_model
from modelfiles.chat_messages import ChatMessage

TOKENS_PER_S = 20
_EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"smollm2-135m-instruct","choices":[{"index":0,"delta":{"content":" river"},"logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)
FRAME = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
"""As the gateway writes it for one token."""


def send(num_clients: int) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=num_clients) as listener:
        print(listener.getsockname()[1], flush=True)
        clients = [listener.accept()[0] for _ in range(num_clients)]
    for client in clients:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.recv(1 << 16)  # its request
        client.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    next_at = time.monotonic()
    try:
        while True:
            next_at += 1 / TOKENS_PER_S
            time.sleep(max(0.0, next_at - time.monotonic()))
            for client in clients:
                client.send(FRAME)
    except OSError:
        pass  # the clients have what they wanted


def tokenize_us(prompts: Sequence[str]) -> float:
    """Template and tokenizer for one prompt: microseconds of this thread."""
    files = open_model(load_config(environ={}).models[0].path)
    tokenizer, template = files.tokenizer(), files.chat_template()
    assert template is not None
    best = float("inf")
    for _ in range(5):
        started = time.thread_time()
        for prompt in prompts:
            template.encode(tokenizer, [ChatMessage(role="user", content=prompt)])
        best = min(best, (time.thread_time() - started) / len(prompts))
    return 1e6 * best


async def calls_us(call: Callable[[], Awaitable[object]], number: int) -> float:
    """What a request asks of router and worker (place, admit, its tokens): microseconds of this process."""
    best = float("inf")
    for _ in range(5):
        started = time.process_time()
        for _ in range(number):
            await call()
        best = min(best, (time.process_time() - started) / number)
    return 1e6 * best


if __name__ == "__main__":
    send(int(sys.argv[1]))
