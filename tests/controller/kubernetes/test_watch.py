"""List and watch against an API server that misbehaves on purpose."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from types import SimpleNamespace

import pytest

from leyden.controller.backends.kubernetes import watch as watch_module
from leyden.controller.backends.kubernetes.api import JOBS, PODS, KubernetesApi
from leyden.controller.backends.kubernetes.cluster_errors import ClusterForbidden
from leyden.controller.backends.kubernetes.watch import Selection, Timing, changes
from tests.controller.kubernetes.conftest import FakeApiServer, items, refusal, reply, stream, thing

QUICK = Timing(watch_s=1, slack_s=0.2, pause_s=0.01, longest_pause_s=0.05)
PLAIN = Timing(watch_s=30, pause_s=0.01, longest_pause_s=0.05)
Short = tuple[str, str, str]


async def take(api: KubernetesApi, count: int, timing: Timing = PLAIN) -> list[Short]:
    """The next changes as (event, name, version)."""
    found: list[Short] = []
    async with asyncio.timeout(100), aclosing(changes(api, [Selection(JOBS, labels="a=b")], timing)) as stream_:  # type: ignore[type-var]
        async for change in stream_:
            metadata = change.object["metadata"] if change.object else {"name": "", "resourceVersion": ""}
            found.append((change.event, metadata["name"], metadata["resourceVersion"]))
            if len(found) == count:
                break
    return found


async def test_a_watch_goes_on_where_the_last_one_ended(server: FakeApiServer, api: KubernetesApi) -> None:
    """From the last version seen, bookmarks included; no second list."""
    server.lists = [items(5, thing("a", 3))]
    server.watches = [
        stream(("MODIFIED", thing("a", 6)), ("BOOKMARK", {"metadata": {"resourceVersion": "9"}})),
        stream(("DELETED", thing("a", 10))),
        stream(then="silent"),
    ]
    assert await take(api, 4) == [
        ("ADDED", "a", "3"),
        ("LISTED", "", ""),
        ("MODIFIED", "a", "6"),
        ("DELETED", "a", "10"),
    ]
    assert [q.get("resourceVersion") for q in server.asked[:3]] == [None, "5", "9"]
    assert server.asked[1]["allowWatchBookmarks"] == "true"
    assert server.asked[1]["timeoutSeconds"] == "30"
    assert {q["labelSelector"] for q in server.asked} == {"a=b"}


@pytest.mark.parametrize(
    "expired",
    [
        stream(("ERROR", {"code": 410, "reason": "Expired", "message": "too old resource version: 5 (9)"})),
        refusal(410, "The resourceVersion for the provided watch is too old.", "Expired"),
    ],
    ids=["event", "status"],
)
async def test_an_expired_version_is_listed_anew(server: FakeApiServer, api: KubernetesApi, expired: object) -> None:
    """410: what happened meanwhile is told as if it had been watched."""
    server.lists = [
        items(5, thing("same", 1), thing("changed", 2), thing("gone", 3)),
        items(20, thing("same", 1), thing("changed", 12), thing("new", 13)),
    ]
    server.watches = [expired, stream(then="silent")]  # type: ignore[list-item]
    assert await take(api, 8) == [
        ("ADDED", "same", "1"),
        ("ADDED", "changed", "2"),
        ("ADDED", "gone", "3"),
        ("LISTED", "", ""),
        ("DELETED", "gone", "3"),
        ("MODIFIED", "changed", "12"),
        ("ADDED", "new", "13"),
        ("LISTED", "", ""),
    ]


async def test_a_silent_watch_is_left(server: FakeApiServer, api: KubernetesApi) -> None:
    """Beyond the time that the server was given, a stream without a byte is dead; a list tells what it
    kept to itself."""
    server.lists = [items(5, thing("a", 3)), items(9, thing("a", 8))]
    server.watches = [stream(then="silent")]
    assert await take(api, 4, QUICK) == [
        ("ADDED", "a", "3"),
        ("LISTED", "", ""),
        ("MODIFIED", "a", "8"),
        ("LISTED", "", ""),
    ]


async def test_a_list_is_taken_from_time_to_time(server: FakeApiServer, api: KubernetesApi) -> None:
    """Also where watches end in time but leave events out."""
    server.lists = [items(5, thing("a", 3)), items(9)]
    server.watches = [stream(("BOOKMARK", {"metadata": {"resourceVersion": "8"}}))]
    timing = Timing(watch_s=30, resync_s=0.05)
    assert await take(api, 4, timing) == [
        ("ADDED", "a", "3"),
        ("LISTED", "", ""),
        ("DELETED", "a", "3"),
        ("LISTED", "", ""),
    ]


@pytest.mark.parametrize("broken", ["cut", "half a line"])
async def test_a_broken_watch_is_listed_anew(server: FakeApiServer, api: KubernetesApi, broken: str) -> None:
    server.lists = [items(5), items(7, thing("a", 6))]
    watch = stream(then="cut") if broken == "cut" else stream(b'{"type": "ADDED", "object": {"meta\n')
    server.watches = [watch, stream(then="silent")]
    assert await take(api, 3) == [("LISTED", "", ""), ("ADDED", "a", "6"), ("LISTED", "", "")]


async def test_events_of_any_length_and_repeated_ones(server: FakeApiServer, api: KubernetesApi) -> None:
    """A line is longer than any buffer; an addition that is known is none."""
    server.lists = [items(5, thing("a", 3))]
    long = thing("b", 7, text="é" * 3_000_000)
    server.watches = [stream(("ADDED", thing("a", 3)), ("ADDED", thing("a", 6)), ("ADDED", long), then="silent")]
    assert await take(api, 4) == [("ADDED", "a", "3"), ("LISTED", "", ""), ("MODIFIED", "a", "6"), ("ADDED", "b", "7")]


async def test_an_api_server_that_comes_back(server: FakeApiServer, api: KubernetesApi) -> None:
    """5xx and 429 are waited for, also at the very start."""
    server.lists = [
        reply(503, {}),
        refusal(429, "too many requests"),
        items(5),
        refusal(500, "etcd"),
        items(9, thing("a", 8)),
    ]
    server.watches = [refusal(500, "etcdserver: leader changed"), stream(then="silent")]
    assert await take(api, 3) == [("LISTED", "", ""), ("ADDED", "a", "8"), ("LISTED", "", "")]


async def test_rights_that_are_missing(server: FakeApiServer, api: KubernetesApi) -> None:
    """At the start that is said; later it is waited for: an API server that starts refuses for a moment."""
    server.lists = [refusal(403, 'jobs.batch is forbidden: User "u" cannot list resource "jobs"')]
    with pytest.raises(ClusterForbidden, match="cannot list resource"):
        await take(api, 1)
    server.lists = [items(5), refusal(403, "forbidden"), items(9)]
    server.watches = [refusal(410, "old"), stream(then="silent")]
    assert await take(api, 2) == [("LISTED", "", ""), ("LISTED", "", "")]


async def test_two_kinds_in_one_stream(server: FakeApiServer, api: KubernetesApi) -> None:
    server.lists = [items(5)]
    server.watches = [stream(then="silent")]
    kinds = set()
    async with asyncio.timeout(100), aclosing(changes(api, [Selection(JOBS), Selection(PODS)])) as stream_:  # type: ignore[type-var]
        async for change in stream_:
            kinds.add(change.kind)
            if len(kinds) == 2:
                break
    assert kinds == {JOBS, PODS}


class Pauses:
    """Pauses that are asked for, and take no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, enough: int) -> None:
        self.asked: list[float] = []
        self.over = asyncio.Event()
        sleep = asyncio.sleep

        async def note(seconds: float) -> None:
            self.asked.append(seconds)
            if len(self.asked) >= enough:
                self.over.set()
                await sleep(3600)
            await sleep(0)

        monkeypatch.setattr(watch_module, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": note}))


@pytest.mark.parametrize(
    "endless",
    [
        stream(),
        stream(("BOOKMARK", {"metadata": {"resourceVersion": "9"}})),
        stream(("ERROR", {"code": 410, "reason": "Expired"})),
        stream(b'{"type": "ERROR", "object": null}\n'),
        stream(b'{"type": "ERROR", "object": {"code": "x", "message": 3}}\n'),
        stream(b'{"type": "ADDED", "object": null}\n'),
        stream(b'{"type": "ADDED", "object": {"metadata": {"name": "a"}}}\n'),
        stream(b'{"type": "ADDED", "object": {"metadata": {"name": "a", "uid": "u", "resourceVersion": 3}}}\n'),
        stream(b'{"type": "BOOKMARK", "object": {}}\n'),
        stream(b'{"type": "ADDED"}\n'),
        stream(b"[]\n"),
        stream(b"null\n"),
        refusal(410, "too old", "Expired"),
        refusal(429, "slow down"),
        refusal(500, "etcd"),
        reply(403, {"message": "forbidden"}),
    ],
)
async def test_a_watch_that_gets_nowhere_is_asked_ever_more_seldom(
    server: FakeApiServer, api: KubernetesApi, monkeypatch: pytest.MonkeyPatch, endless: object
) -> None:
    pauses = Pauses(monkeypatch, 8)
    server.lists, server.watches = [items(5)], [endless]  # type: ignore[list-item]
    reading = asyncio.create_task(take(api, 10**9, Timing()))
    async with asyncio.timeout(60):
        await pauses.over.wait()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    growing = [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert all(limit / 2 <= asked <= limit for asked, limit in zip(pauses.asked, growing, strict=True))
    assert len(server.asked) <= 2 * len(growing)


async def test_a_watch_that_tells_something_makes_the_pause_short_again(
    server: FakeApiServer, api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = Pauses(monkeypatch, 5)
    server.lists, server.watches = [items(5)], [stream(), stream(), stream(("ADDED", thing("a", 6))), stream()]
    reading = asyncio.create_task(take(api, 10**9, Timing()))
    async with asyncio.timeout(60):
        await pauses.over.wait()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    growing = [0.2, 0.4, 0.2, 0.4, 0.8]
    assert all(limit / 2 <= asked <= limit for asked, limit in zip(pauses.asked, growing, strict=True))


@pytest.mark.parametrize("body", [{}, {"items": None}, {"items": [None], "metadata": {"resourceVersion": "1"}}, [], 3])
async def test_a_malformed_list_is_taken_again(server: FakeApiServer, api: KubernetesApi, body: object) -> None:
    server.lists = [reply(200, body), items(9, thing("a", 8))]
    server.watches = [stream(then="silent")]
    assert await take(api, 2) == [("ADDED", "a", "8"), ("LISTED", "", "")]


async def test_nulls_are_what_missing_fields_are(server: FakeApiServer, api: KubernetesApi) -> None:
    odd = thing("a", 3, status=None, spec={"x": None, "y": [{"z": None}]})
    odd["metadata"]["annotations"] = None
    server.lists = [items(5, odd)]
    found, _ = await api.list_all(JOBS)
    assert found == [thing("a", 3, status={}, spec={"y": [{}]})]
