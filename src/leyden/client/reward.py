"""For graders: report the reward of the attempt being graded. Standard library only."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from typing import SupportsFloat

from leyden.errors import GatewayError
from leyden.rewards import reward_number

RETRY_LIMIT_S = 60.0
UNWRITABLE = 503


def post_reward(value: SupportsFloat, *, retry_limit_s: float = RETRY_LIMIT_S) -> None:
    """Post one finite number as the attempt's reward, to LEYDEN_REWARD_URL with LEYDEN_KEY. What counts as a
    number says `leyden.rewards.reward_number`.

    Raises GatewayError if the variables are missing, the value is not a finite number, the gateway refuses
    it, or for `retry_limit_s` no connection was accepted or the gateway's disk was full.
    """
    url, key = os.environ.get("LEYDEN_REWARD_URL"), os.environ.get("LEYDEN_KEY")
    if not url or not key:
        raise GatewayError("LEYDEN_REWARD_URL and LEYDEN_KEY are not set; run this as the grader of a Leyden run")
    try:
        number = reward_number(value)
    except ValueError as error:
        raise GatewayError(f"the reward {error}") from None
    request = urllib.request.Request(  # noqa: S310  (the controller sets the address)
        url,
        data=json.dumps({"value": number}).encode(),
        headers={"authorization": f"Bearer {key}", "content-type": "application/json"},
        method="POST",
    )
    give_up = time.monotonic() + retry_limit_s
    while not _accepted(request, give_up):
        time.sleep(0.5)


def _accepted(request: urllib.request.Request, give_up: float) -> bool:
    """Whether the gateway took the request; False if it is not there or cannot write, and there is time left."""
    try:
        with urllib.request.urlopen(request, timeout=60):  # noqa: S310
            return True
    except urllib.error.HTTPError as error:
        if error.code == UNWRITABLE and time.monotonic() < give_up:
            return False
        text = error.read(2000).decode(errors="replace")
        raise GatewayError(f"reward refused with status {error.code}: {text}", status=error.code) from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, ConnectionRefusedError) and time.monotonic() < give_up:
            return False
        raise GatewayError(f"the reward could not be posted to {request.full_url}: {error.reason}") from None
