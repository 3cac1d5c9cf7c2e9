"""What an agent may ask of the gateway at once: a large body keeps others waiting for none of its work."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from leyden.errors import BudgetExceeded, RequestError
from leyden.gateway.attempts import Attempt
from leyden.gateway.render import ModelRenderer
from leyden.gateway.tokenizer import FastTokenizer, load
from leyden.gateway.workers import LARGE_BYTES, THREADS, Workers
from leyden.protocols.checks import MAX_CONTAINERS, MAX_VALUES, loads
from tests.gateway.conftest import Gateway, make_config, serving
from tests.qwen_tokenizers import qwen_tokenizer_folder

LONG = "The quick brown fox jumps over the lazy dog. " * 250_000
USER = {"role": "user", "content": LONG}
CONTENTS = {"contents": [{"role": "user", "parts": [{"text": LONG}]}]}
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"model": "m", "messages": [USER]},
    "/v1/completions": {"model": "m", "prompt": LONG},
    "/v1/responses": {"model": "m", "input": LONG},
    "/v1/messages": {"model": "m", "max_tokens": 1, "messages": [USER]},
    "/v1/messages/count_tokens": {"model": "m", "messages": [USER]},
    "/v1beta/models/m:generateContent": CONTENTS,
    "/v1beta/models/m:countTokens": CONTENTS,
}


async def post(gateway: Gateway, key: str, path: str, body: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) as session,
        session.post(gateway.url + path, data=data) as response,
    ):
        return response.status, await response.json()


@pytest.mark.parametrize("path", BODIES)
async def test_a_text_far_over_the_context_is_refused_before_it_is_tokenised(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """11 MB of text: a small part of it is looked at, off the event loop."""
    folder = qwen_tokenizer_folder("qwen3")
    encoded: list[tuple[int, bool]] = []
    encode = FastTokenizer._ids

    def seen(tokenizer: FastTokenizer, text: str, add_special_tokens: bool) -> list[int]:
        encoded.append((len(text), threading.current_thread() is threading.main_thread()))
        return encode(tokenizer, text, add_special_tokens)

    monkeypatch.setattr(FastTokenizer, "_ids", seen)
    renderer = ModelRenderer(str(folder), "qwen3", "template")
    async with serving(make_config(tmp_path, folder), renderer) as gateway:
        rollout_id, key = await gateway.start_rollout()
        encoded.clear()
        status, answer = await post(gateway, key, path, BODIES[path])
        assert status == 400
        assert "maximum context length is 2000 tokens" in answer["error"]["message"]
        assert sum(size for size, _ in encoded) < 200_000
        assert not any(on_loop for _, on_loop in encoded)
        assert await gateway.turns(rollout_id) == []
        assert gateway.engine.requests == []


async def test_many_small_messages_are_refused_like_a_long_one(gateway: Gateway) -> None:
    _, key = await gateway.start_rollout()
    body = {"model": "m", "messages": [{"role": "user", "content": "a b c d"}] * 10_000}
    status, answer = await post(gateway, key, "/v1/chat/completions", body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        (b'{"x": [' + b"[]," * MAX_CONTAINERS + b"0]}", f"more than {MAX_CONTAINERS} lists, objects and fields"),
        (b"{" + b'"x":0,' * MAX_CONTAINERS + b'"y": 0}', f"more than {MAX_CONTAINERS} lists, objects and fields"),
        (b'{"x": [' + b"0," * MAX_VALUES + b"0]}", f"more than {MAX_VALUES} values"),
        (
            b'{"x\\\\": "\\"", "y": [' + b"{}," * MAX_CONTAINERS + b"0]}",
            f"more than {MAX_CONTAINERS} lists, objects and fields",
        ),
    ],
    ids=["lists", "fields", "numbers", "after escapes"],
)
async def test_bodies_of_too_many_values_are_a_400(gateway: Gateway, body: bytes, refusal: str) -> None:
    _, key = await gateway.start_rollout()
    for path in BODIES:
        status, answer = await post(gateway, key, path, body)
        assert (status, refusal in answer["error"]["message"]) == (400, True)


def test_brackets_and_commas_within_strings_are_no_values() -> None:
    text = "[{,:" * 1_000_000
    for value in (text, text + "\\", '"' + text, '\\"' * 300_000 + text, "\\" * 300_001 + text):
        assert loads(json.dumps({"x": value, "y": [1]})) == ({"x": value, "y": [1]}, 0)


async def test_arguments_that_hold_too_many_values_stay_text(gateway: Gateway) -> None:
    arguments = "{" + '"a": [' + "[]," * 400_000 + "0]}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c", "content": "y"}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}, result]
    body = {"model": "m", "messages": messages}
    _, key = await gateway.start_rollout()
    status, answer = await post(gateway, key, "/v1/chat/completions", body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_large_bodies_that_fit_are_answered(gateway: Gateway) -> None:
    """A field without effect may be large; the text continues the turn before it."""
    rollout_id, key = await gateway.start_rollout()
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "m", "messages": messages, "metadata": {"blob": "x" * 5_000_000}}
    status, answer = await post(gateway, key, "/v1/chat/completions", body)
    assert status == 200
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "and now?"}]
    assert (await post(gateway, key, "/v1/chat/completions", body))[0] == 200
    first, second = await gateway.turns(rollout_id)
    assert second.parent_id == first.turn_id


# Workers


@contextmanager
def unheld(_attempt: Attempt, _since: float) -> Iterator[None]:
    yield


async def test_large_work_runs_in_a_thread_and_one_attempt_waits_for_itself() -> None:
    workers = Workers(unheld)
    mine, other = (Attempt(name, 1, "train", None) for name in ("mine", "other"))
    assert await workers.run(mine, LARGE_BYTES - 1, threading.get_ident) == threading.get_ident()
    assert await workers.run(mine, LARGE_BYTES, threading.get_ident) != threading.get_ident()
    go, begun = threading.Event(), threading.Semaphore(0)

    def wait() -> None:
        begun.release()
        go.wait()

    held_up = [asyncio.create_task(workers.run(mine, LARGE_BYTES, wait)) for _ in range(10)]
    assert await workers.run(other, LARGE_BYTES, lambda: begun.acquire(timeout=60))
    assert not begun.acquire(blocking=False)
    go.set()
    await asyncio.gather(*held_up)
    workers.close()


async def test_the_wait_for_others_is_held_time() -> None:
    held: list[str] = []

    @contextmanager
    def hold(attempt: Attempt, _since: float) -> Iterator[None]:
        held.append(attempt.rollout_id)
        yield

    workers = Workers(hold)
    go = threading.Event()
    busy = [
        asyncio.create_task(workers.run(Attempt(f"busy {n}", 1, "train", None), LARGE_BYTES, go.wait))
        for n in range(THREADS)
    ]
    await asyncio.sleep(0)
    waiting = asyncio.create_task(workers.run(Attempt("waits", 1, "train", None), LARGE_BYTES, lambda: "done"))
    await asyncio.sleep(0)
    assert held == ["waits"]
    waiting.cancel()
    go.set()
    await asyncio.gather(*busy)
    assert await workers.run(Attempt("next", 1, "train", None), LARGE_BYTES, lambda: "done") == "done"
    workers.close()


async def test_a_thread_that_nobody_waits_for_any_more_still_takes_its_place() -> None:
    workers = Workers(unheld)
    attempt = Attempt("r", 1, "train", None)
    go = threading.Event()
    left = asyncio.create_task(workers.run(attempt, LARGE_BYTES, go.wait))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait([left])
    assert attempt.working.locked()
    go.set()
    assert await workers.run(attempt, LARGE_BYTES, lambda: "next") == "next"
    workers.close()


async def test_a_standstill_of_the_gateway_is_held_time_of_running_attempts(gateway: Gateway) -> None:
    running, _ = await gateway.start_rollout()
    (waits,) = await gateway.client.create_groups([{"kind": "train", "step": 2, "slot": 0, "size": 1, "task": {}}])
    gateway.app.state.turns.attempts.stalled(7.0)
    assert (await gateway.client.rollout(running)).held_s == 7.0
    assert (await gateway.client.rollout(waits.rollouts[0].rollout_id)).held_s == 0.0


async def test_refused_calls_count_against_no_budget_before_and_after_a_restart(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer
) -> None:
    config = make_config(tmp_path, tokenizer_path, harness={"max_turns": 2})
    too_long = {"model": "m", "messages": [{"role": "user", "content": "x y z " * 1000}]}
    short = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    path = "/v1/chat/completions"
    async with serving(config, renderer) as gateway:
        _, key = await gateway.start_rollout()
        codes = [(await post(gateway, key, path, too_long))[1]["error"]["code"] for _ in range(5)]
        assert codes == ["context_length_exceeded"] * 5
        assert (await post(gateway, key, path, short))[0] == 200
    async with serving(config, renderer) as gateway:
        assert (await post(gateway, key, path, short))[0] == 200
        status, answer = await post(gateway, key, path, short)
        assert (status, answer["error"]["code"]) == (400, "budget_exceeded")


async def test_the_store_keeps_only_the_first_of_the_calls_that_failed(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leyden.gateway.turn.MOST_FAILED", 2)
    rollout_id, key = await gateway.start_rollout()
    too_long = {"model": "m", "messages": [{"role": "user", "content": "x y z " * 1000}]}
    for _ in range(4):
        assert (await post(gateway, key, "/v1/chat/completions", too_long))[0] == 400
    assert gateway.app.state.turns._store.turns.used(rollout_id, 1) == (0, 2, 0)


async def test_what_the_store_keeps_of_requests_is_bounded(
    tmp_path: Path, tokenizer_path: Path, renderer: ModelRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leyden.gateway.turn.MOST_KEPT_BYTES", 2000)
    async with serving(make_config(tmp_path, tokenizer_path, gateway={"keep_wire": True}), renderer) as gateway:
        _, key = await gateway.start_rollout()
        random = "".join(f"{n * 7919 % 65536:04x}" for n in range(2000))
        body = {"model": "m", "input": "x", "metadata": {"noise": random}}
        status, answer = await post(gateway, key, "/v1/responses", body)
        assert (status, answer["error"]["code"]) == (400, "budget_exceeded")
        assert "the limit is 2000" in answer["error"]["message"]
        assert (await post(gateway, key, "/v1/responses", {"model": "m", "input": "x"}))[0] == 200


def test_a_text_that_the_tokenizer_gives_up_on_is_refused() -> None:
    """The expressions of a pre-tokenizer have a limit, which a very long run of spaces meets: Rust panics then."""
    tokenizer = load(str(qwen_tokenizer_folder("qwen3")))
    with pytest.raises(RequestError, match="the tokenizer gives up on a text of 16000000 characters") as caught:
        tokenizer.encode(" " * 16_000_000)
    assert caught.value.code == "invalid_value"
    assert tokenizer.encode("x") == [87]


def test_a_text_longer_than_the_longest_tokens_is_refused_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load(str(qwen_tokenizer_folder("qwen3")))
    longest = len(" " * 128)
    assert len(tokenizer.encode(" " * longest)) == 1
    monkeypatch.setattr(FastTokenizer, "_ids", lambda *_: pytest.fail("tokenised"))
    with tokenizer.at_most(1000), pytest.raises(BudgetExceeded, match="are far longer"):
        tokenizer.encode(" " * (1000 * 1000))
