"""The HTTP client of engines against servers that answer with given bytes."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from leyden.gateway.engines.connections import Answer, Connections
from tests.gateway.conftest import listening, until

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@dataclass
class Bytes:
    """Answers each request with the next of `answers`, then closes if it is None or was told to."""

    answers: list[bytes | None]
    close_after: bool = False
    url: str = ""
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0
    ended: int = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0) if self.answers else OK
                if answer is None:
                    await reader.read()
                    break
                for byte in (answer[:7], answer[7:]):
                    writer.write(byte)
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.close_after:
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            self.ended += 1
            writer.close()


@asynccontextmanager
async def serving(server: Bytes, host: str = "127.0.0.1") -> AsyncIterator[Bytes]:
    async with listening(server, host) as server.url:
        yield server


@pytest.fixture
async def client() -> AsyncIterator[Connections]:
    connections = Connections(600.0)
    yield connections
    connections.close()


async def test_one_connection_is_kept_for_calls_after_each_other(client: Connections) -> None:
    async with serving(Bytes([])) as server:
        for _ in range(3):
            assert await client.request("POST", server.url + "/base", "/path", b"body") == Answer(200, b"ok", None)
        client.close()
    assert server.connections == 1
    host = server.url.removeprefix("http://").encode()
    assert server.requests[0] == (
        b"POST /base/path HTTP/1.1\r\nhost: %s\r\naccept: */*\r\ncontent-type: application/json\r\n"
        b"content-length: 4\r\n\r\nbody" % host
    )


async def test_calls_at_the_same_time_have_connections_of_their_own(client: Connections) -> None:
    async with serving(Bytes([])) as server:
        answers = await asyncio.gather(*(client.request("GET", server.url, "/") for _ in range(20)))
        client.close()
    assert {answer.body for answer in answers} == {b"ok"}
    assert server.connections == 20


@pytest.mark.parametrize(
    ("raw", "answer"),
    [
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n", (200, b"abcde")),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\nContent-Length: 1\r\n\r\nx", (201, b"x")),
        (b"HTTP/1.1 429 Slow\r\nRetry-After: 7\r\ncontent-length: 0\r\n\r\n", (429, b"")),
        (b"HTTP/1.1 204 No Content\r\n\r\n", (204, b"")),
        (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n", (304, b"")),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nx-trailer: 1\r\n\r\n", (200, b"ab")),
        (b"HTTP/1.1 103 Early\r\nretry-after: 3\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx", (200, b"x")),
    ],
)
async def test_answers_of_all_framings(client: Connections, raw: bytes, answer: tuple[int, bytes]) -> None:
    """And the connection is used again after each."""
    async with serving(Bytes([raw])) as server:
        got = await client.request("GET", server.url, "/")
        assert (got.status, got.body) == answer
        assert got.retry_after == ("7" if got.status == 429 else None)
        assert await client.request("GET", server.url, "/") == Answer(200, b"ok", None)
        client.close()
    assert server.connections == 1


async def test_a_connection_that_the_server_gives_up_is_not_used_again(client: Connections) -> None:
    close = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"
    async with serving(Bytes([close, OK, OK])) as server:
        for _ in range(2):
            await client.request("GET", server.url, "/")
    assert server.connections == 2
    async with serving(Bytes([], close_after=True)) as server:
        for _ in range(3):
            await client.request("GET", server.url, "/")
            await until(lambda: not any(kept.reusable for kept in client._idle[server.url]))
    assert server.connections == 3


async def test_idle_connections_are_dropped_in_time() -> None:
    client = Connections(0.05)
    async with serving(Bytes([])) as server:
        await asyncio.gather(*(client.request("GET", server.url, "/") for _ in range(5)))
        await asyncio.sleep(0.1)
        await client.request("GET", server.url, "/")
        await until(lambda: server.ended == 5)
        client.close()
    assert server.connections == 6


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\n\r\n",
        b"HTTP/1.1 103 Early\r\ncontent-length: 7\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: identity\r\n\r\n",
    ],
)
@pytest.mark.parametrize("body", [b"", b"ok", b"x" * 300_000], ids=len)
async def test_a_body_without_a_length_ends_with_the_connection(client: Connections, head: bytes, body: bytes) -> None:
    async with serving(Bytes([head + body] * 2, close_after=True)) as server:
        for _ in range(2):
            assert await client.request("POST", server.url, "/") == Answer(200, body, None)
    assert (server.connections, len(server.requests)) == (2, 2)


async def test_an_old_server_that_keeps_its_connection_keeps_it(client: Connections) -> None:
    old = b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nok"
    async with serving(Bytes([old, old])) as server:
        for _ in range(2):
            assert await client.request("GET", server.url, "/") == Answer(200, b"ok", None)
        client.close()
    assert server.connections == 1


async def test_a_body_without_a_length_that_is_reset_is_none(client: Connections) -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhalf")
        await writer.drain()
        linger = struct.pack("ii", 1, 0)  # no wait for what was not sent: the other side sees a reset
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()

    async with listening(reset) as url:
        with pytest.raises(OSError, match="in the middle of the answer"):
            await client.request("GET", url, "/")


@pytest.mark.parametrize("more", [OK, b"x", b"HTTP/1.1 200 OK\r\n"])
async def test_what_nobody_asked_for_is_the_answer_to_nothing(client: Connections, more: bytes) -> None:
    """Sent with an answer or after it: the next call has a connection of its own."""
    async with serving(Bytes([OK + more])) as server:
        for _ in range(3):
            assert await client.request("GET", server.url, "/") == Answer(200, b"ok", None)
        client.close()
    assert server.connections == 2


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "closed before the answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n", "closed in the middle of the answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nok", "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\nok", "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\nok", "does not speak HTTP"),
        (b"HTTP/1.1 101 Switch\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "does not speak HTTP"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", "closed in the middle of the answer"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf", "closed in the middle of the answer"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", "closed in the middle of the answer"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not speak HTTP"),
    ],
)
async def test_answers_that_are_none(client: Connections, raw: bytes, said: str) -> None:
    async with serving(Bytes([raw], close_after=True)) as server:
        with pytest.raises(OSError, match=said):
            await client.request("GET", server.url, "/")


async def test_a_cancelled_call_closes_its_connection(client: Connections) -> None:
    async with serving(Bytes([None])) as server:
        calling = asyncio.create_task(client.request("GET", server.url, "/"))
        await until(lambda: bool(server.requests))
        calling.cancel()
        await until(lambda: server.ended == 1)
        with pytest.raises(asyncio.CancelledError):
            await calling


async def test_nobody_there(client: Connections) -> None:
    async with serving(Bytes([])) as server:
        gone = server.url
    with pytest.raises(OSError, match=r"refused|Connect"):
        await client.request("GET", gone, "/")


async def test_an_address_of_version_six(client: Connections) -> None:
    try:
        async with serving(Bytes([]), "::1") as server:
            assert (await client.request("GET", server.url, "/")).body == b"ok"
            assert b"host: [::1]:" in server.requests[0]
            client.close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")


async def test_a_server_that_speaks_no_tls(client: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leyden.gateway.engines.connections.CONNECT_S", 0.2)
    async with serving(Bytes([OK])) as server:
        with pytest.raises(OSError):
            await client.request("GET", server.url.replace("http:", "https:"), "/")
