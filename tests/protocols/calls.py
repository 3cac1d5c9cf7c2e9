"""The `Call` that protocols parse with, without a gateway."""

from __future__ import annotations

from dataclasses import dataclass, field

from leyden.protocols import Call
from leyden.types import Json


@dataclass
class Remembered:
    """`Recall` from plain dictionaries."""

    replies: dict[int, Json] = field(default_factory=dict)
    asked: dict[int, list[Json]] = field(default_factory=dict)

    def reply(self, turn_id: int) -> Json | None:
        return self.replies.get(turn_id)

    def messages(self, turn_id: int) -> list[Json] | None:
        return self.asked.get(turn_id)


NO_CALL = Call({}, Remembered())
