"""What programs need to talk to a gateway: keys, the control API, turns, rewards.

Names are imported on first use, so that a grader which only posts a reward does not load aiohttp or Arrow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leyden.client.arrow import decode, encode
    from leyden.client.control import ControlClient
    from leyden.client.keys import control_key, mint, verify
    from leyden.client.reward import post_reward
    from leyden.client.secret import read_or_create_secret
    from leyden.records import Claim, ExitReceipt, Group, Model, Recovery, Rollout

_HOME = {
    "Claim": "leyden.records",
    "ControlClient": "leyden.client.control",
    "ExitReceipt": "leyden.records",
    "Group": "leyden.records",
    "Model": "leyden.records",
    "Recovery": "leyden.records",
    "Rollout": "leyden.records",
    "control_key": "leyden.client.keys",
    "decode": "leyden.client.arrow",
    "encode": "leyden.client.arrow",
    "mint": "leyden.client.keys",
    "post_reward": "leyden.client.reward",
    "read_or_create_secret": "leyden.client.secret",
    "verify": "leyden.client.keys",
}

__all__ = [
    "Claim",
    "ControlClient",
    "ExitReceipt",
    "Group",
    "Model",
    "Recovery",
    "Rollout",
    "control_key",
    "decode",
    "encode",
    "mint",
    "post_reward",
    "read_or_create_secret",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
