"""The control API under whatever its own description allows and forbids: documented answers, never a 5xx."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from leyden.client import control_key
from leyden.gateway.control_routes import OPERATIONS
from leyden.gateway.openapi import document
from leyden.types import Scope
from tests.gateway.conftest import SECRET, Gateway

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]
KEY = {"authorization": f"Bearer {control_key(SECRET)}"}
PLACES = [(op.method, op.path) for op in OPERATIONS if Scope.CONTROL in op.scopes]


@pytest.mark.parametrize(("method", "path"), PLACES, ids=[f"{method} {path}" for method, path in PLACES])
async def test_the_control_api_does_what_its_description_says(gateway: Gateway, method: str, path: str) -> None:
    known = [(await gateway.start_rollout())[0] for _ in range(3)]
    schema = schemathesis.openapi.from_dict(document() | {"security": []})  # every call has the key
    schema.config.update(base_url=gateway.url)
    operation = schema[path][method]

    @settings(
        max_examples=20,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
        derandomize=True,
    )
    @given(case=st.one_of([operation.as_strategy(generation_mode=mode) for mode in GenerationMode]))
    def check(case: Any) -> None:
        if "rollout_id" in case.path_parameters and len(case.path_parameters["rollout_id"]) % 2:
            case.path_parameters["rollout_id"] = known[len(case.path_parameters["rollout_id"]) % 3]
        if case.query and "wait_s" in case.query and str(case.query["wait_s"])[:1].isdigit():
            case.query["wait_s"] = 0.01
        case.call_and_validate(headers=KEY, checks=CHECKS)

    await asyncio.to_thread(check)


async def test_a_bug_is_a_500_that_tells_nothing(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "what was said"

    def broken(*_: Any) -> Any:
        raise TypeError(words)

    monkeypatch.setattr("leyden.store.Rollouts.get", broken)
    async with (
        aiohttp.ClientSession(headers=KEY) as session,
        session.get(f"{gateway.url}/api/rollouts/r1") as response,
    ):
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (500, "internal_error")
    logged = "\n".join(record.getMessage() + (record.exc_text or "") for record in caplog.records)
    assert "GET /api/rollouts/{rollout_id}: TypeError" in logged
    assert "in broken" in logged
    assert words not in logged + str(error)
