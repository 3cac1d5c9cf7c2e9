"""Whether engines sample, as their calls show: one can answer GET /health and fail every call, or never answer any."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Iterator
from typing import TypeVar

from leyden.errors import CaptureError, EngineBroken, EngineUnavailable

T = TypeVar("T")


class Evidence:
    """`silence_s`: how long an engine that has open calls may answer none of them before it is asked for one token;
    that may take as long again.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._open: Counter[str] = Counter()
        self._heard: dict[str, float] = {}
        self._broke: set[str] = set()

    @contextlib.contextmanager
    def call(self, url: str) -> Iterator[None]:
        """One call. How it ends says something of the engine, unless it is ended from here."""
        if not self._open[url]:
            self.heard(url)
        self._open[url] += 1
        try:
            yield
        except (EngineUnavailable, CaptureError) as error:
            self.heard(url)
            if not _busy(error):
                self._broke.add(url)
            raise
        else:
            self._works(url)
        finally:
            self._open[url] -= 1

    def heard(self, url: str) -> None:
        self._heard[url] = time.monotonic()

    def doubtful(self, url: str) -> bool:
        """Whether the last call broke, or none has ended for too long."""
        return url in self._broke or self.silent(url)

    def silent(self, url: str) -> bool:
        return self._open[url] > 0 and time.monotonic() - self._heard[url] > self._silence_s

    async def proof(self, url: str, probe: Awaitable[T]) -> T:
        """The answer of `probe`, a call for one token. Raises EngineBroken if there is none, of an engine that answers
        GET /health, and the EngineUnavailable of one that is only busy.
        """
        try:
            async with asyncio.timeout(self._silence_s):
                answer = await probe
        except TimeoutError as error:
            self._broke.add(url)
            raise EngineBroken(
                f"engine {url} answers GET /health, but samples not one token within {self._silence_s:g} s"
            ) from error
        except (EngineUnavailable, CaptureError) as error:
            if _busy(error):
                self.heard(url)
                raise
            self._broke.add(url)
            raise EngineBroken(f"engine {url} answers GET /health, but samples nothing: {error}") from error
        self._works(url)
        return answer

    def _works(self, url: str) -> None:
        self._broke.discard(url)
        self.heard(url)


def _busy(error: EngineUnavailable | CaptureError) -> bool:
    return isinstance(error, EngineUnavailable) and error.busy
