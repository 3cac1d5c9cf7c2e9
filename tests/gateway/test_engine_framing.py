"""Engines of both kinds that end an answer with the connection: one turn each, plain and streamed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from leyden.gateway.render import ModelRenderer
from tests.gateway.conftest import listening, make_config, serving
from tests.gateway.fake_vllm import chatted, completed, generated
from tests.gateway.test_chat import SYSTEM, USER, call, sdk

OWN = {"token_ids": [300, 2], "logprobs": [-0.5, -0.5], "finish_reason": "stop", "spans": [[0, 2]]}
CERTAIN = {"logprobs": {"content": [{"token_id": 5, "token": "token_id:5", "logprob": 0.0}]}}


def answered(path: str, body: Any) -> Any:
    """What an engine says on `path`; probes are told by their one token."""
    if path == "/generate":
        return OWN
    if path == "/inference/v1/generate":
        return generated([5], **CERTAIN) if body["sampling_params"]["max_tokens"] == 1 else generated([300, 2])
    if path == "/v1/chat/completions":
        return chatted([9], [5], **CERTAIN) if body["max_completion_tokens"] == 1 else chatted([9, 10], [300, 2])
    return completed([300, 2]) if path == "/v1/completions" else {"data": []}


class Closing:
    """Sends no length and closes."""

    def __init__(self, head: bytes) -> None:
        self.head = head
        self.asked: list[str] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        body = await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
        path = head.split()[1]
        self.asked.append(path)
        writer.write(self.head + json.dumps(answered(path, json.loads(body) if body else None)).encode())
        writer.close()


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "engine", [{"kind": "leyden"}, {"kind": "vllm"}, {"kind": "vllm", "render": "engine"}], ids=str
)
async def test_an_answer_that_ends_with_its_connection_is_one_turn(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, engine: Any, stream: bool, head: bytes
) -> None:
    server = Closing(head)
    async with listening(server) as url:
        config = make_config(tmp_path, tokenizer_path, engine=engine | {"urls": [url]})
        async with serving(config, renderer) as gateway:
            rollout_id, key = await gateway.start_rollout()
            answer: Any = await call(sdk(gateway, key, max_retries=0), [SYSTEM, USER], stream=stream, max_tokens=9)
            if stream:
                assert [chunk async for chunk in answer][-1].choices[0].finish_reason == "stop"
            (turn,) = await gateway.turns(rollout_id)
    assert turn.sampled_T.tolist() == [300, 2]
    probes = 1 if engine["kind"] == "vllm" else 0
    assert len([path for path in server.asked if path not in ("/health", "/v1/models")]) == 1 + probes
