import asyncio
import socket
import threading

import aiohttp
import pytest
import uvicorn

from leyden.trainer.embedded.sampler import Sampler
from leyden.trainer.embedded.server import build_app

from .conftest import byte_tokenizer, tiny_model

TIMEOUT_S = 300


@pytest.fixture
def sampler():
    sampler = Sampler(
        tiny_model(), slots=2, context_tokens=200, decode=byte_tokenizer().decode, version=5, lineage="abc"
    )
    sampler.start()
    yield sampler
    sampler.close()


@pytest.fixture
async def session(sampler):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(build_app(sampler), log_level="error"))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with aiohttp.ClientSession(base_url=url) as session:
            yield session
        server.should_exit = True
        await task


async def post(session, **body):
    async with session.post("/generate", json=body) as response:
        return response.status, await response.json()


async def until(condition):
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_generate(session):
    status, first = await post(session, prompt_ids=[1, 2, 3], max_tokens=6, seed=1, temperature=0.5)
    assert status == 200
    assert list(first) == ["token_ids", "logprobs", "finish_reason", "spans", "stop_string"]
    assert len(first["token_ids"]) == len(first["logprobs"]) == 6
    assert (first["finish_reason"], first["spans"], first["stop_string"]) == ("length", [[5, 6]], None)
    stop = first["token_ids"][3]
    expected = first["token_ids"][: first["token_ids"].index(stop) + 1]
    _, second = await post(session, prompt_ids=[1, 2, 3], max_tokens=6, seed=1, temperature=0.5, stop_token_ids=[stop])
    assert (second["token_ids"], second["finish_reason"]) == (expected, "stop")


async def test_health(session):
    async with session.get("/health") as response:
        assert await response.json() == {"version": 5, "lineage": "abc"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": "abc"}, "prompt_ids is 'abc': Input should be a valid array"),
        ({"prompt_ids": [1, True]}, "prompt_ids.1 is True: Input should be a valid integer"),
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": [300]}, "ids are 0 to 299"),
        ({"prompt_ids": [1] * 200}, "the prompt has 200 tokens"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5: Input should be a valid integer"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": "1"}, "temperature is '1': Input should be a valid number"),
        ({"top_p": 2}, "top_p is 2"),
        ({"top_k": None}, "top_k is None: Input should be a valid integer"),
        ({"stop": "x"}, "stop is 'x': Input should be a valid"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"best_of": 2}, "best_of is 2: Unexpected keyword argument"),
    ],
)
async def test_bad_input_is_400_and_says_why(session, change, message):
    status, answer = await post(session, **({"prompt_ids": [1, 2], "max_tokens": 3} | change))
    assert status == 400
    assert message in answer["error"]


async def test_not_json_is_400(session):
    for body, message in [
        (b"{", "Invalid JSON"),
        (b"[1]", "the body is [1]"),
        (b"{}", "prompt_ids is {}: Field required"),
    ]:
        async with session.post("/generate", data=body) as response:
            assert response.status == 400
            assert message in (await response.json())["error"]


async def test_hanging_up_cancels(session, sampler):
    started, go_on, futures = threading.Event(), threading.Event(), []
    forward, submit = sampler.model.forward, sampler.submit

    def waiting(*args, **kwargs):
        started.set()
        assert go_on.wait(TIMEOUT_S)
        return forward(*args, **kwargs)

    def noting(request):
        futures.append(submit(request))
        return futures[-1]

    sampler.model.forward, sampler.submit = waiting, noting
    call = asyncio.create_task(post(session, prompt_ids=[1, 2, 3], max_tokens=190))
    await until(started.is_set)
    assert sampler.load == (1, 0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(futures[0].cancelled)
    go_on.set()
    await until(lambda: sampler.load == (0, 0))
    assert sampler.stats.sampled < 190


async def test_after_close_it_is_503(session, sampler):
    sampler.close()
    status, answer = await post(session, prompt_ids=[1], max_tokens=3)
    assert (status, answer) == (503, {"error": "the sampler is closed"})
