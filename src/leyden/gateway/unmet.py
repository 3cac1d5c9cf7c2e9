"""What harnesses asked for and did not get since the gateway started: counted, and said once each in the log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

log = logging.getLogger(__name__)


class Wishes:
    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def note(self, unmet: Iterable[str]) -> None:
        """Of one call: the names of what it did not get."""
        for name in dict.fromkeys(unmet):
            if not self.calls[name]:
                log.warning(
                    "a harness asks for %s, which it does not get (docs/protocols.md says what has effect)", name
                )
            self.calls[name] += 1
