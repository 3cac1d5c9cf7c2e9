"""The gateway counts what harnesses ask for and do not get, and says it once in its log."""

from __future__ import annotations

import logging

import pytest

from tests.gateway.conftest import Gateway
from tests.gateway.test_bad_input import CHAT, post
from tests.gateway.test_chat import USER


async def test_what_is_not_given_is_counted_and_logged_once(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    _, key = await gateway.start_rollout()
    assert await gateway.client.unmet() == {}
    asked = {"response_format": {"type": "json_object"}, "chat_template_kwargs": {"budget": 1}, "invented\x1b[2J": 1}
    for number in range(2):
        body = {"model": "m", "messages": [{"role": "user", "content": str(number)}], **asked}
        assert (await post(gateway, key, CHAT, body))[0] == 200
    assert (await post(gateway, key, CHAT, {"model": "m", "messages": [USER]}))[0] == 200
    assert await gateway.client.unmet() == {"response_format": 2, "chat_template_kwargs": 2}
    said = [record.getMessage() for record in caplog.records if "asks for" in record.getMessage()]
    assert [text.split(",")[0] for text in said] == [
        "a harness asks for response_format",
        "a harness asks for chat_template_kwargs",
    ]
