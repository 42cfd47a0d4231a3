"""The gateway's HTTP server on a real socket: what is no HTTP, heads without end, bodies in chunks, certificates."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import uvloop

from core.config import TlsConfig
from core.errors import ConfigError
from gateway.tls import Certificate
from tests.support.certificates import write_certificate
from tests.support.scripted import Script
from tests.support.site import Site, cluster_config, open_site, serve
from tests.support.tiny_tokenizer import ids_of

ANSWER = "hello world"
BODY = json.dumps({"model": "m", "prompt": "say it"}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
PLAIN = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
LIMITS = {"max_header_bytes": 4096, "header_timeout_s": 0.2, "max_body_bytes": 200_000, "max_requests": 64}


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    async with open_site(Script(steps=[ids_of(ANSWER)]), limits=LIMITS) as it:
        yield it


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address(site: Site) -> AsyncIterator[str]:
    async with serve(site.gateway, cluster_config(limits=LIMITS).gateway) as it:
        yield it


class Answer:
    def __init__(self, raw: bytes) -> None:
        head, _, self.body = raw.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        self.status = int(lines[0].split()[1])
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}

    @property
    def error(self) -> dict[str, Any]:
        """Checks the shape that every error has."""
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert len(self.headers["x-request-id"]) == 32
        assert self.headers["content-type"] == "application/json"
        return error


async def talk(address: str, *pieces: bytes) -> Answer:
    """Sends the pieces one by one and reads until the server closes."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass  # refused in the middle of it; the answer may be there all the same
        async with asyncio.timeout(60):
            return Answer(await reader.read())
    finally:
        writer.close()


async def works(address: str) -> None:
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"http://{address}/v1/completions", json={"model": "m", "prompt": "say it"})
    assert answer.json()["choices"][0]["text"] == ANSWER


# -- heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 80,
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\na: b\x00c\r\n\r\n",
        b"GET /he\xff\xfealth HTTP/1.1\r\nhost: x\r\n\r\n",
        HEAD + b"content-length: -5\r\n\r\n",
        HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n",
    ],
    ids=["word", "tls", "version", "header", "nul", "bytes", "negative", "both", "two"],
)
async def test_what_is_no_http_gets_the_shape_of_every_error(address: str, raw: bytes) -> None:
    answer = await talk(address, raw)
    assert (answer.status, answer.error["code"]) == (400, "malformed_request")
    assert answer.headers["connection"] == "close"
    await works(address)


@pytest.mark.parametrize(
    "pieces",
    [
        [b"GET /health HTTP/1.1\r\nx-long: " + b"a" * 9000 + b"\r\n\r\n"],
        [b"GET /health HTTP/1.1\r\nx-long: "] + [b"a" * 1000] * 200,
        [b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nhost: x\r\n\r\n"],
        [b"GET /"] + [b"a" * 1000] * 200,
        [b"GET /health HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % n for n in range(900)) + b"\r\n"],
        [HEAD + b"transfer-encoding: chunked\r\n\r\n", b"2\r\n{}\r\n0\r\n", b"x-trailer: "] + [b"a" * 1000] * 200,
    ],
    ids=["header", "header-in-pieces", "path", "path-in-pieces", "many", "trailer"],
)
async def test_a_head_is_bounded(address: str, pieces: list[bytes]) -> None:
    answer = await talk(address, *pieces)
    assert (answer.status, answer.error["code"]) == (431, "headers_too_large")
    await works(address)


async def test_a_head_of_just_the_size_passes(address: str) -> None:
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
    answer = await talk(
        address, PLAIN.replace(b"host: x", b"host: x\r\nx-long: " + b"a" * 3000 + b"\r\nconnection: close")
    )
    assert answer.status == 200


async def test_a_head_that_does_not_arrive_is_given_up(address: str) -> None:
    answer = await talk(address, b"GET /health HTTP/1.1\r\nhost:")
    assert (answer.status, answer.error["type"]) == (408, "timeout_error")
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(60):
        assert await reader.read() == b"", "a silent connection is closed without a word"
    writer.close()


async def test_a_connection_in_use_may_rest_longer_than_a_head_may_take(address: str, site: Site) -> None:
    site.cluster.hold("admit")
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(PLAIN)
        await site.cluster.until("admit")
        await asyncio.sleep(2 * LIMITS["header_timeout_s"])  # the time itself is what is looked at
        site.cluster.release("admit")
        async with asyncio.timeout(60):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    finally:
        writer.close()


# -- bodies -----------------------------------------------------------------------------------------------------------


def chunked(*chunks: bytes) -> list[bytes]:
    return [b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks]


async def test_a_body_in_chunks_is_read(address: str) -> None:
    pieces = chunked(BODY[:3], BODY[3:9], BODY[9:])
    answer = await talk(
        address, HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n", *pieces, b"0\r\n\r\n"
    )
    assert answer.status == 200


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_is_counted_while_it_arrives(address: str, is_chunked: bool) -> None:
    """Neither a length that is promised nor one that is not told makes the gateway read on."""
    filler = [b" " * 50_000] * 40
    if is_chunked:
        answer = await talk(address, HEAD + b"transfer-encoding: chunked\r\n\r\n", *chunked(*filler))
    else:
        answer = await talk(address, HEAD + b"content-length: 900000000\r\n\r\n", *filler)
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")
    await works(address)


async def test_a_client_that_asks_first_is_told_to_go_on(address: str) -> None:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(PLAIN.partition(b"\r\n\r\n")[0] + b"\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n")
    async with asyncio.timeout(60):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.endswith(b"}")


async def test_a_promised_length_above_the_limit_is_refused_unread(address: str) -> None:
    answer = await talk(address, HEAD + b"content-length: 900000000\r\nexpect: 100-continue\r\n\r\n")
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("request_line", "status", "code"),
    [
        ("GET /nowhere", 404, "not_found"),
        ("GET //v1/models", 404, "not_found"),
        ("GET /v1/models/", 404, None),
        ("PUT /v1/models", 405, "method_not_allowed"),
        ("DELETE /v1/chat/completions", 405, "method_not_allowed"),
        ("OPTIONS /v1/completions", 405, "method_not_allowed"),
        ("GET /v1/models/other", 404, "model_not_found"),
        ("GET /v1/models?key=secret", 200, None),
        ("HEAD /health", 200, None),
    ],
)
async def test_every_answer_has_an_id_and_every_error_the_shape(
    address: str, request_line: str, status: int, code: str | None
) -> None:
    answer = await talk(address, f"{request_line} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    assert answer.status == status
    assert len(answer.headers["x-request-id"]) == 32
    if code is not None:
        assert answer.error["code"] == code
    if status == 405:
        assert answer.headers["allow"] in ("GET", "POST")


async def test_a_websocket_is_not_opened(address: str) -> None:
    upgrade = (
        b"connection: upgrade, close\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: eA==\r\n"
    )
    answer = await talk(address, b"GET /v1/chat/completions HTTP/1.1\r\nhost: x\r\n" + upgrade + b"\r\n")
    assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")


# -- certificates -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tls(tmp_path: Path) -> dict[str, object]:
    write_certificate(tmp_path / "cert.pem", tmp_path / "key.pem", name="first")
    return {"cert": str(tmp_path / "cert.pem"), "key": str(tmp_path / "key.pem"), "reload_s": 0.02}


async def shown(address: str, trust: str) -> str:
    """The name in the certificate of a new connection that trusts the file `trust`."""
    host, port = address.split(":")
    context = ssl.create_default_context(cafile=trust)
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        subject = dict(pair[0] for pair in writer.get_extra_info("peercert")["subject"])
    finally:
        writer.close()
    del reader
    name: str = subject["commonName"]
    return name


async def until(is_true: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not await is_true():
            await asyncio.sleep(0.02)


async def test_a_certificate_that_changes_on_disk_serves_new_connections(
    site: Site, tls: dict[str, object], tmp_path: Path
) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    old = tmp_path / "old.pem"
    old.write_bytes(cert.read_bytes())
    context = ssl.create_default_context(cafile=str(old))
    async with (
        serve(site.gateway, cluster_config(tls=tls).gateway) as address,
        httpx.AsyncClient(verify=context) as client,
    ):
        url = f"https://{address}/v1/completions"
        body = {"model": "m", "prompt": "say it"}
        assert (await client.post(url, json=body)).status_code == 200
        assert await shown(address, str(old)) == "first"
        write_certificate(cert, key, name="second")

        async def is_new() -> bool:
            try:
                return await shown(address, str(cert)) == "second"
            except ssl.SSLError:
                return False

        await until(is_new)
        answer = await client.post(url, json=body)
        assert answer.json()["choices"][0]["text"] == ANSWER, "the connection that stood goes on"
        with pytest.raises(ssl.SSLError):
            await shown(address, str(old))


async def test_a_pair_that_does_not_match_leaves_the_old_one(tls: dict[str, Any], tmp_path: Path) -> None:
    certificate = Certificate(TlsConfig(**tls))
    assert not await certificate.refresh(), "nothing changed"
    write_certificate(tmp_path / "cert.pem", tmp_path / "other.pem", name="second")
    assert not await certificate.refresh(), "the key is still the first one's"
    (tmp_path / "cert.pem").unlink()
    assert not await certificate.refresh()
    write_certificate(tmp_path / "cert.pem", tmp_path / "key.pem", name="third")
    assert await certificate.refresh()


async def test_plain_http_on_a_tls_port_harms_nobody(site: Site, tls: dict[str, object]) -> None:
    async with serve(site.gateway, cluster_config(tls=tls).gateway) as address:
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(PLAIN)
        async with asyncio.timeout(60):
            assert not (await reader.read()).startswith(b"HTTP")
        writer.close()
        assert await shown(address, str(tls["cert"])) == "first"


@pytest.mark.parametrize("what", ["absent", "swapped", "text"])
async def test_a_bad_certificate_is_one_line_at_start(tls: dict[str, Any], tmp_path: Path, what: str) -> None:
    if what == "absent":
        tls |= {"key": str(tmp_path / "none.pem")}
    elif what == "swapped":
        tls |= {"key": tls["cert"], "cert": tls["key"]}
    else:
        (tmp_path / "cert.pem").write_text("hello")
    with pytest.raises(ConfigError, match=r"gateway\.tls: .*(check the path|must be PEM)") as error:
        Certificate(TlsConfig(**tls))
    assert "\n" not in error.value.message
