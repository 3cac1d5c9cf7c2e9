"""Variables of the chat template: the run file's, and a request's own over them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from leyden.errors import ConfigError
from leyden.gateway.render import ModelRenderer, check_template_kwargs, load_renderer
from leyden.types import Json
from tests.gateway.conftest import Gateway, make_config, serving
from tests.gateway.fake_vllm import FakeVllm, chatted, listening
from tests.gateway.test_bad_input import CHAT, post
from tests.gateway.test_chat import USER
from tests.gateway.test_engines import config_for, metric
from tests.gateway.test_reading import MESSAGES, RESPONSES
from tests.qwen_tokenizers import qwen_tokenizer_folder

OFF = {"enable_thinking": False}
COUNTED = 'leyden_ignored_fields_total{field="chat_template_kwargs"}'
NO_THOUGHT = "<think>\n\n</think>\n\n"
ASKED: dict[str, Json] = {
    CHAT: {"messages": [USER]},
    RESPONSES: {"input": [USER]},
    MESSAGES: {"max_tokens": 50, "messages": [USER]},
}


async def prompts(gateway: Gateway, key: str, path: str, *wishes: Any) -> list[str]:
    """The prompts of one call per wish, each of a conversation of its own."""
    for number, wish in enumerate(wishes):
        wished = {} if wish is None else {"chat_template_kwargs": wish}
        body = {name: [*value] if isinstance(value, list) else value for name, value in ASKED[path].items()}
        (listed,) = (name for name, value in body.items() if isinstance(value, list))
        body[listed] = [{"role": "user", "content": f"question {number}"}]
        status, answer = await post(gateway, key, path, {"model": "m", **body, **wished})
        assert status == 200, answer
    return [gateway.renderer.decode(request.prompt_ids) for request in gateway.engine.requests[-len(wishes) :]]


@pytest.mark.parametrize("path", ASKED)
async def test_a_request_has_its_own(gateway: Gateway, path: str) -> None:
    """Honoured for that request alone."""
    _, key = await gateway.start_rollout()
    plain, off, on, again = await prompts(gateway, key, path, None, OFF, {"enable_thinking": True}, None)
    assert off.endswith(f"<|im_start|>assistant\n{NO_THOUGHT}")
    for prompt in (plain, on, again):
        assert prompt.endswith("<|im_start|>assistant\n")


async def test_a_conversation_goes_on_from_its_ids_whatever_each_call_wants(gateway: Gateway) -> None:
    rollout_id, key = await gateway.start_rollout()
    gateway.engine.replies = ["one", "two", "three"]
    messages = [USER]
    for wish in (OFF, {}, OFF):
        body = {"model": "m", "messages": messages, "chat_template_kwargs": wish}
        _, answer = await post(gateway, key, CHAT, body)
        messages = [*messages, answer["choices"][0]["message"], USER]
    one, two, three = await gateway.turns(rollout_id)
    assert [one.fork_cause, two.fork_cause, three.fork_cause] == [None] * 3
    assert (two.parent_id, three.parent_id) == (one.turn_id, two.turn_id)
    endings = [gateway.renderer.decode(turn.delta_P).endswith(NO_THOUGHT) for turn in (one, two, three)]
    assert endings == [True, False, True]


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
async def test_the_run_file_decides_where_a_request_says_nothing(tmp_path: Path, family: str) -> None:
    folder = qwen_tokenizer_folder(family)
    config = make_config(tmp_path, folder, model={"renderer": family, "template_kwargs": OFF})
    async with serving(config, load_renderer(config.model)) as gateway:
        _, key = await gateway.start_rollout()
        plain, same, on = await prompts(gateway, key, CHAT, None, OFF, {"enable_thinking": True})
        assert plain.endswith(NO_THOUGHT)
        assert same.endswith(NO_THOUGHT)
        assert not on.endswith(NO_THOUGHT)
        assert await metric(gateway, COUNTED) == 0


async def test_what_the_template_does_not_know_has_no_effect_and_is_counted(gateway: Gateway) -> None:
    _, key = await gateway.start_rollout()
    (prompt,) = await prompts(gateway, key, CHAT, {"thinking_budget": 5, **OFF})
    assert prompt.endswith(NO_THOUGHT)
    assert await metric(gateway, COUNTED) == 1


async def test_a_value_that_the_template_does_not_take_is_refused(gateway: Gateway) -> None:
    _, key = await gateway.start_rollout()
    for value in ("no", 0, [], "maybe"):
        wish = {"chat_template_kwargs": {"enable_thinking": value}}
        status, answer = await post(gateway, key, CHAT, {"model": "m", "messages": [USER], **wish})
        assert status == 400
        assert "enable_thinking" in answer["error"]["message"]
    status, answer = await post(gateway, key, CHAT, {"model": "m", "messages": [USER], "chat_template_kwargs": "x"})
    assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs")
    assert gateway.engine.requests == []


async def test_an_engine_that_renders_is_sent_both(tmp_path: Path) -> None:
    async with listening(FakeVllm(default=chatted([1], [4]))) as vllm:
        config = config_for(
            tmp_path, Path("/nowhere/model"), vllm, engine={"render": "engine"}, model={"template_kwargs": OFF}
        )
        async with serving(config, None) as gateway:  # type: ignore[arg-type]
            _, key = await gateway.start_rollout()
            for wish in ({}, {"enable_thinking": True}, {"x": 1}):
                body = {"model": "m", "messages": [USER], "chat_template_kwargs": wish}
                assert (await post(gateway, key, CHAT, body))[0] == 200
            sent = [body["chat_template_kwargs"] for body in vllm.bodies]
            assert sent == [OFF, {"enable_thinking": True}, OFF | {"x": 1}]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"enable_thinkin": False}, "'enable_thinkin' is not known to the renderer 'qwen3'; it knows enable_thinking"),
        ({"thinking_retention": "all"}, "'thinking_retention' is not known"),
        ({"enable_thinking": "no"}, "enable_thinking is 'no'; the renderer 'qwen3' reads another value in it"),
        ({"enable_thinking": "perhaps"}, "enable_thinking: Input should be a valid boolean"),
    ],
)
def test_the_run_file_is_refused_at_the_start(tmp_path: Path, tokenizer_path: Path, kwargs: Json, message: str) -> None:
    """By whatever loads the renderer."""
    config = make_config(tmp_path, tokenizer_path, model={"template_kwargs": kwargs})
    for refused in (
        lambda: check_template_kwargs("qwen3", kwargs),
        lambda: load_renderer(config.model),
    ):
        with pytest.raises(ConfigError, match="model.template_kwargs.*" + re.escape(message)):
            refused()


def test_what_becomes_of_earlier_reasoning_may_be_set() -> None:
    """The renderer that keeps all of it would contradict; it is used where there is none."""
    folder = str(qwen_tokenizer_folder("qwen3.5"))
    for value in (True, False):
        ModelRenderer(folder, "qwen3.6", "template", {"preserve_thinking": value})
    with pytest.raises(ConfigError, match="preserve_thinking"):
        ModelRenderer(folder, "qwen3.6", "keep", {"preserve_thinking": False})
