"""What is known of a Job, and how it can stand. Times are Unix seconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from leyden.controller.backends.kubernetes.objects import Object, being_deleted
from leyden.controller.jobs import Exit

# On the Job: how the harness ended, where its pod was ended afterwards because other containers ran on.
ENDED = "leyden/ended"


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of one Job. `pods` are in their last known state; `gone` holds the uids of those deleted since.

    `job` is None once it is deleted, and while it is only `expected`: a pod may be seen before its Job. `changed` is
    when one of the objects last changed. `killed` is why and when this controller ended it, which the Job may not say
    yet while its pod is on its way out already. `said` is what a keeper that hangs has printed.
    """

    job: Object | None
    pods: Sequence[Object] = ()
    events: Sequence[Object] = ()
    gone: frozenset[str] = frozenset()
    changed: float = 0.0
    expected: bool = False
    killed: tuple[str, float] | None = None
    said: str | None = None

    @property
    def deleting(self) -> bool:
        """Whether the Job is deleted or on its way out."""
        return not self.expected and being_deleted(self.job)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long things may take: `queue_s` to the start of the harness in all, `image_s` from the first refusal of its
    image or container, `save_s` for the keeper after the harness's end, `node_s` for a node to come back, `settle_s`
    for what Kubernetes has promised (a condition, the end of a deleted pod)."""

    queue_s: float
    image_s: float
    save_s: float
    node_s: float = 300.0
    settle_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Pending:
    """The harness does not run yet. `why` is for people."""

    why: str


@dataclass(frozen=True, slots=True)
class Running:
    started: float


@dataclass(frozen=True, slots=True)
class Saving:
    """The harness has ended; the keeper still saves the workspace."""

    exit: Exit


@dataclass(frozen=True, slots=True)
class Ended:
    """`saved`: the keeper has saved the workspace. `certain`: the containers' own ends say so, and nothing that may
    have been missed can say otherwise."""

    exit: Exit
    saved: bool = False
    certain: bool = field(default=False, compare=False)

    @property
    def note(self) -> str | None:
        return self.exit.note


Verdict = Pending | Running | Saving | Ended


def note_of(ended: Ended) -> str:
    """An end as text, for the Job's annotation."""
    return json.dumps({"exit": asdict(ended.exit), "saved": ended.saved})


def noted_end(job: Object | None) -> Ended | None:
    text = ((job or {}).get("metadata", {}).get("annotations") or {}).get(ENDED)
    if not text:
        return None
    try:
        noted = json.loads(text)
        exit_, saved = Exit.from_json(noted["exit"]), bool(noted["saved"])
    except (ValueError, TypeError, KeyError):
        return None
    return Ended(exit_, saved, certain=True) if exit_ is not None else None
