"""What reaches a harness of the environment that Leyden runs in, and the exceptions of proxies in every spelling."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable

import httpx
import pytest

from leyden.config import RunConfig
from leyden.controller.backends.interface import Events
from leyden.controller.backends.local import LocalBackend
from leyden.controller.backends.local_jobs import local_jobs
from leyden.controller.environment import inherited, reaching
from leyden.errors import ConfigError
from tests.controller.test_plan import rollout

Config = Callable[..., RunConfig]
URL = "http://10.0.0.9:8123"
OWN = {
    "PATH": "/bin", "HOME": "/home/me", "LC_ALL": "C.UTF-8", "TZ": "UTC", "https_proxy": "http://proxy:1",
    "SSL_CERT_FILE": "/ca.pem", "LD_LIBRARY_PATH": "/opt/lib",
}  # fmt: skip
SECRETS = dict.fromkeys(["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "LEYDEN_SECRET", "OPENAI_API_KEY", "SSH_AUTH_SOCK"], "s")


def test_only_what_every_program_needs_and_what_is_named_is_inherited() -> None:
    assert inherited(OWN | SECRETS, []) == OWN
    assert inherited(OWN | SECRETS, ["HF_TOKEN"]) == OWN | {"HF_TOKEN": "s"}


def test_harness_and_grader_are_given_their_own_names(config: Config) -> None:
    made = config(harness={"pass_env": ["A"]}, grader={"command": ["g"], "pass_env": ["B", "OPENAI_API_KEY"]})
    parent = SECRETS | {"A": "1", "B": "2", "PATH": "/bin"}
    jobs = local_jobs(made, URL, parent)
    harness, grader = jobs.harness(rollout("r1"), "key").env, jobs.grader(rollout("r1"), "key", 1).env
    preloaded = jobs.preload_environment()
    assert (harness["A"], harness.get("B"), harness["OPENAI_API_KEY"]) == ("1", None, "key")
    assert (grader.get("A"), grader["B"], grader["OPENAI_API_KEY"]) == (None, "2", "s")
    assert "HF_TOKEN" not in {*harness, *grader}
    assert (preloaded["A"], set(SECRETS) & set(preloaded)) == ("1", set())


@pytest.mark.parametrize("section", ["harness", "grader"])
def test_a_name_that_is_not_set_is_refused_at_the_start(config: Config, section: str) -> None:
    given = {"harness": {"pass_env": ["NOT_SET"]}, "grader": {"command": ["g"], "pass_env": ["NOT_SET"]}}
    made = config(**{section: given[section]})
    with pytest.raises(ConfigError, match=rf"{section}.pass_env: NOT_SET is not set where Leyden was started"):
        LocalBackend(made, URL, {"PATH": "/bin"}, Events(*[lambda *_: None] * 3))


def test_the_reward_address_is_the_harness_s_only_if_it_grades(config: Config) -> None:
    own = local_jobs(config(grader={"harness": True}), URL, {}).harness(rollout("r1"), "key").env
    other = local_jobs(config(), URL, {}).harness(rollout("r1"), "key").env
    assert (own["LEYDEN_REWARD_URL"], "LEYDEN_REWARD_URL" in other) == (f"{URL}/api/reward", False)


@pytest.mark.parametrize(
    ("base", "given", "told"),
    [
        ({}, {}, "10.0.0.9"),
        ({"NO_PROXY": "internal.corp"}, {}, "internal.corp,10.0.0.9"),
        ({"no_proxy": "internal.corp"}, {}, "internal.corp,10.0.0.9"),
        ({"NO_PROXY": "a, b", "no_proxy": "b c"}, {}, "a,b,c,10.0.0.9"),
        ({"No_Proxy": "a"}, {}, "a,10.0.0.9"),
        ({"NO_PROXY": "*"}, {}, "*"),
        ({"NO_PROXY": "a", "no_proxy": "b,*"}, {}, "*"),
        ({"NO_PROXY": "a,10.0.0.9"}, {}, "a,10.0.0.9"),
        ({"no_proxy": "a"}, {"NO_PROXY": "b"}, "b,10.0.0.9"),
        ({}, {"no_proxy": "*"}, "*"),
        ({"NO_PROXY": "*"}, {"no_proxy": ""}, "10.0.0.9"),
    ],
)
def test_the_user_s_exceptions_and_the_gateway_s_hold(base: dict[str, str], given: dict[str, str], told: str) -> None:
    assert reaching("10.0.0.9", base, given) == {"NO_PROXY": told, "no_proxy": told}


def test_a_proxy_of_the_run_file_replaces_every_spelling_of_it() -> None:
    base = {"http_proxy": "http://old:1", "All_Proxy": "http://old:2", "PATH": "/bin"}
    given = {"HTTP_PROXY": "http://new:1", "ALL_PROXY": "http://new:2"}
    found = reaching("10.0.0.9", base, given)
    assert found == {"PATH": "/bin", **given, "NO_PROXY": "10.0.0.9", "no_proxy": "10.0.0.9"}


@pytest.mark.parametrize(
    ("base", "given"),
    [
        ({"HTTP_PROXY": "http://p:1", "NO_PROXY": "internal.corp"}, {}),
        ({"all_proxy": "http://p:1", "http_proxy": "http://p:1", "no_proxy": "*"}, {}),
        ({}, {"http_proxy": "http://p:1", "NO_PROXY": "internal.corp"}),
    ],
)
def test_clients_reach_gateway_and_exceptions_directly(
    monkeypatch: pytest.MonkeyPatch, base: dict[str, str], given: dict[str, str]
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in reaching("10.0.0.9", base, given).items():
        monkeypatch.setenv(name, value)
    assert urllib.request.proxy_bypass("10.0.0.9:8123") and urllib.request.proxy_bypass("internal.corp")
    with httpx.Client() as client:
        for url in (URL, "http://internal.corp/x"):
            assert client._transport_for_url(httpx.URL(url)) is client._transport
