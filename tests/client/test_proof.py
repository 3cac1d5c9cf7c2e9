"""No key reaches another program that answers where the gateway did."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from leyden.cli.record import record_of
from leyden.client import ControlClient, control_key, verify
from leyden.client.keys import parts
from leyden.client.proof import UnprovenGateway, gateways_proof, proof
from leyden.doctor import access
from leyden.errors import GatewayError, Unauthorized
from leyden.gateway.render import ModelRenderer
from tests.gateway.conftest import SECRET, make_config, serving

KEY = control_key(SECRET)
NONCE = "0f" * 32


class Stranger:
    """Says 200 to everything, or hangs up, and keeps what it was sent."""

    def __init__(self, said: str | None) -> None:
        self.said = said
        self.sent = ""
        self.asked = asyncio.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.sent += (await reader.readuntil(b"\r\n\r\n")).decode()
        except asyncio.IncompleteReadError as error:
            self.sent += error.partial.decode()
            writer.close()
            return
        self.asked.set()
        if self.said is not None:
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(self.said)}\r\n\r\n{self.said}".encode())
        writer.close()

    def saw_no_key(self) -> bool:
        return bool(self.sent) and "authorization" not in self.sent.lower() and parts(KEY)[1] not in self.sent


@asynccontextmanager
async def at(stranger: Stranger, port: int = 0) -> AsyncIterator[str]:
    listener = socket.create_server(("127.0.0.1", port))
    async with await asyncio.start_server(stranger.answer, sock=listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="module")
def renderer(tokenizer_path: Path) -> ModelRenderer:
    return ModelRenderer(str(tokenizer_path), "qwen3", "template")


SAYINGS = [None, "{}", "[]", "hello", '{"proof": "00"}', '{"proof": 1}', '{"proof": "\\u00e9"}']


@pytest.mark.parametrize("said", SAYINGS)
async def test_a_stranger_gets_no_key(said: str | None, tmp_path: Path, tokenizer_path: Path) -> None:
    stranger = Stranger(said)
    config = make_config(tmp_path, tokenizer_path)
    async with at(stranger) as url:
        for call in (ControlClient.models, ControlClient.pause, ControlClient.health, ControlClient.run_name):
            async with ControlClient(url, KEY) as client:
                with pytest.raises(UnprovenGateway, match=f"what answers at {url} is not this run's gateway"):
                    await call(client)
        there = config.model_copy(update={"gateway": config.gateway.model_copy(update={"url": url})})
        async with record_of(tmp_path, there, SECRET) as record:
            with pytest.raises(GatewayError, match="no key was sent"):
                await record.rollouts()
        for calls in ([access.HEALTH, access.READS], access.REFUSALS):
            assert (await access.ask(url, calls, SECRET))[-1].status is None
    assert stranger.saw_no_key()


async def test_a_stranger_between_two_gateways_gets_no_key(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer
) -> None:
    config = make_config(tmp_path, tokenizer_path)
    stranger = Stranger("{}")
    async with serving(config, renderer) as gateway:
        port = int(gateway.url.rsplit(":", 1)[1])
        client = ControlClient(gateway.url, KEY, retry_limit_s=100)
        assert [m.name for m in await client.models()] == ["policy"]
    call = asyncio.create_task(client.models())  # refused at first
    async with at(stranger, port):
        await asyncio.wait_for(stranger.asked.wait(), 60)
    async with serving(config, renderer, port=port):
        assert [m.name for m in await call] == ["policy"]
    await client.close()
    assert stranger.saw_no_key()


async def test_a_gateway_with_another_secret_says_so(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer
) -> None:
    config, key = make_config(tmp_path, tokenizer_path), control_key(b"x" * 32)
    async with serving(config, renderer) as gateway, ControlClient(gateway.url, key) as client:
        with pytest.raises(UnprovenGateway, match="it has another secret: is LEYDEN_SECRET that of the gateway"):
            await client.models()


async def test_calls_on_one_connection_are_proved_once(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    proofs = []
    prove = ControlClient._prove

    async def counted(client: ControlClient) -> None:
        proofs.append(client)
        await prove(client)

    monkeypatch.setattr(ControlClient, "_prove", counted)
    async with serving(make_config(tmp_path, tokenizer_path), renderer) as gateway:
        proofs.clear()
        async with ControlClient(gateway.url, KEY) as client:
            client._session().connector._keepalive_timeout = 1000  # type: ignore[union-attr]
            for _ in range(20):
                await client.models()
        assert len(proofs) == 1


def test_a_proof_is_no_key_and_answers_bounded_questions_only() -> None:
    claims, signature = parts(KEY)
    answered = gateways_proof(SECRET, NONCE, claims)
    assert answered == proof(signature, NONCE) != gateways_proof(SECRET, NONCE[:-1], claims)
    with pytest.raises(Unauthorized):
        verify(SECRET, f"{claims}-{answered[:43]}", 0.0)
    asked = [("", claims), ("0f", claims), ("0f" * 65, claims), ("g" * 64, claims), (NONCE, "x" * 1025), (NONCE, "é")]
    assert [gateways_proof(SECRET, *question) for question in asked] == [None] * len(asked)
