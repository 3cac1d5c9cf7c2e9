"""Which distribution a call samples from: a value of 0 is a value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from leyden.errors import ConfigError
from leyden.gateway.engines import Sampling
from leyden.gateway.sampling import of_call
from leyden.protocols import ChatRequest, HarnessSampling
from tests.gateway.conftest import Gateway, make_config

TRAINING = Sampling(0.7, max_tokens=50)
GREEDY = (0.0, 1.0, 0)


def sampled(**asked: Any) -> tuple[float, float, int]:
    sampling = of_call(TRAINING, "eval", None, ChatRequest("m", sampling=HarnessSampling(**asked)))
    return sampling.temperature, sampling.top_p, sampling.top_k


@pytest.mark.parametrize(
    ("asked", "distribution"),
    [
        ({}, (1.0, 1.0, 0)),
        ({"temperature": 0.0}, GREEDY),
        ({"temperature": 0.0, "top_p": 0.9, "top_k": 5}, GREEDY),
        ({"top_p": 0.0}, GREEDY),
        ({"top_p": 0.0, "temperature": 1.5, "top_k": 3}, GREEDY),
        ({"top_k": 0}, (1.0, 1.0, 0)),
        ({"top_k": -1}, (1.0, 1.0, 0)),
        ({"top_k": 1, "top_p": 0.5}, (1.0, 0.5, 1)),
        ({"temperature": 1e-40}, (0.01, 1.0, 0)),
        ({"temperature": 2.0, "top_p": 1e-9}, (2.0, 1e-9, 0)),
    ],
)
def test_evaluation_samples_as_the_harness_asks(asked: Any, distribution: Any) -> None:
    assert sampled(**asked) == distribution


def test_training_samples_as_the_run_file_says() -> None:
    request = ChatRequest("m", sampling=HarnessSampling(0.0, 0.0, 1, 0), max_tokens=9)
    assert of_call(TRAINING, "train", None, request) == Sampling(0.7, max_tokens=9)


def test_a_groups_own_sampling_holds_with_the_harness_seed() -> None:
    group = {"temperature": 0, "top_p": 0.5, "top_k": 3, "max_tokens": None}
    request = ChatRequest("m", sampling=HarnessSampling(1.0, 1.0, 9, 0))
    assert of_call(TRAINING, "eval", group, request) == Sampling(0, 0.5, 3, seed=0)


MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
CALLS: dict[str, tuple[str, Any, str | None]] = {
    "chat": ("/v1/chat/completions", MESSAGES, None),
    "completions": ("/v1/completions", {"prompt": "hi"}, None),
    "responses": ("/v1/responses", {"input": "hi"}, None),
    "messages": ("/v1/messages", MESSAGES | {"max_tokens": 9}, None),
    "gemini": ("/v1beta/models/m:generateContent", {"contents": [{"parts": [{"text": "hi"}]}]}, "generationConfig"),
}


async def post(gateway: Gateway, call: str, **fields: Any) -> int:
    """The status of an evaluation's call with `fields`."""
    path, body, section = CALLS[call]
    _, key = await gateway.start_rollout("eval")
    document = {"model": "m"} | body | ({section: fields} if section else fields)
    headers = {"authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(gateway.url + path, json=document, headers=headers) as response,
    ):
        return response.status


@pytest.mark.parametrize("call", CALLS)
async def test_zeros_on_every_wire(gateway: Gateway, call: str) -> None:
    gemini = call == "gemini"
    for fields in ({"temperature": 0}, {"topP" if gemini else "top_p": 0}):
        assert await post(gateway, call, **fields) == 200
        request = gateway.engine.requests[-1]
        assert (request.temperature, request.top_p, request.top_k) == GREEDY
    if call != "responses":
        assert await post(gateway, call, **{"topK" if gemini else "top_k": 0}) == 200
        assert gateway.engine.requests[-1].top_k == 0
    if call in ("chat", "completions", "gemini"):
        assert await post(gateway, call, seed=0) == 200
        assert gateway.engine.requests[-1].seed == 0
    names = {"gemini": "maxOutputTokens", "responses": "max_output_tokens"}
    assert await post(gateway, call, **{names.get(call, "max_tokens"): 0}) == 400


@pytest.mark.parametrize(("top_k", "status"), [(0.5, 400), (5.0, 200), (-1, 400)])
async def test_a_top_k_of_gemini_is_a_whole_number(gateway: Gateway, top_k: float, status: int) -> None:
    assert await post(gateway, "gemini", topK=top_k) == status


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"sampling": {"top_p": 0.9}}, "eval.sampling"),
        ({"sampling": {"top_k": 1}}, "eval.sampling"),
        ({"sampling": {"temperature": 1e-40}}, "0.01"),
        ({"sampling": {"temperature": 0}}, "0.01"),
        ({"eval": {"sampling": {"temperature": 1e-40}}}, "0.01"),
        ({"eval": {"sampling": {"temperature": -1}}}, "temperature"),
    ],
)
def test_distributions_that_cannot_be_trained_or_drawn_are_refused(tmp_path: Path, sections: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_config(tmp_path, tmp_path, **sections)


def test_evaluation_may_be_greedy_and_truncated(tmp_path: Path) -> None:
    sampling = {"temperature": 0, "top_p": 0.9, "top_k": 5}
    config = make_config(tmp_path, tmp_path, eval={"sampling": sampling})
    assert config.eval.sampling is not None
    assert (config.eval.sampling.temperature, config.eval.sampling.top_p, config.eval.sampling.top_k) == (0, 0.9, 5)
