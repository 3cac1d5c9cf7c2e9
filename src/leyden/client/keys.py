"""Keys: `lk-<a|g|w|c>-<base64url payload>-<base64url HMAC-SHA256>`, both parts without padding.

The payload is the JSON list [rollout id, attempt, expiry in Unix seconds]; the signature covers everything
before it, the scope letter included. The signature always has 43 characters, which is how the parts are told
apart although base64url itself uses `-`. Signature and expiry are checked here without a read; whether the
attempt still lives is the store's question. No message repeats a key or a part of one.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import math
import time

from leyden.errors import Unauthorized
from leyden.types import Claims, Scope

CONTROL_KEY_LIFETIME_S = 365 * 86400.0
_LETTERS = {Scope.AGENT: "a", Scope.GRADER: "g", Scope.WORKSPACE: "w", Scope.CONTROL: "c"}
_SCOPES = {letter: scope for scope, letter in _LETTERS.items()}
_HEAD_CHARS = len("lk-a-")
_SIGNATURE_CHARS = 43
MOST_KEY_CHARS = 1024


def mint(secret: bytes, claims: Claims) -> str:
    """A key that says `claims`, valid until `claims.expires`."""
    payload = json.dumps([claims.rollout_id, claims.attempt, claims.expires], separators=(",", ":"))
    body = f"lk-{_LETTERS[claims.scope]}-{_encode(payload.encode())}"
    return f"{body}-{sign(secret, body)}"


def verify(secret: bytes, key: str, now: float) -> Claims:
    """The claims of a key at `now` (Unix seconds).

    Raises Unauthorized (401) for a key that is malformed, not signed with `secret`, or expired.
    """
    body, signature = parts(key)
    if not _well_formed(key):
        raise Unauthorized("the key is not a Leyden key; use the one given as LEYDEN_KEY")
    if not hmac.compare_digest(sign(secret, body), signature):
        raise Unauthorized("the key was not issued by this run; use the one given as LEYDEN_KEY")
    claims = _claims(body)
    if now >= claims.expires:
        raise Unauthorized(
            f"the {claims.scope} key expired {now - claims.expires:.0f} s ago; each attempt gets its own"
        )
    return claims


def control_key(secret: bytes, *, now: float | None = None) -> str:
    """A control key for the programs of one run, valid for a year."""
    issued = time.time() if now is None else now
    return mint(secret, Claims(Scope.CONTROL, "", 0, issued + CONTROL_KEY_LIFETIME_S))


def parts(key: str) -> tuple[str, str]:
    """What the key says, and its signature."""
    return key[: -_SIGNATURE_CHARS - 1], key[-_SIGNATURE_CHARS:]


def _well_formed(key: str) -> bool:
    return (
        key.isascii()
        and _HEAD_CHARS + _SIGNATURE_CHARS + 1 < len(key) <= MOST_KEY_CHARS
        and key.startswith("lk-")
        and key[3] in _SCOPES
        and key[4] == "-"
        and key[-_SIGNATURE_CHARS - 1] == "-"
    )


def _claims(body: str) -> Claims:
    """Claims of a body whose signature held; it can only fail if another program shares the secret."""
    try:
        rollout_id, attempt, expires = json.loads(_decode(body[_HEAD_CHARS:]))
    except (ValueError, TypeError, binascii.Error):
        raise Unauthorized("the key's payload is of another version of Leyden") from None
    if not (isinstance(rollout_id, str) and isinstance(attempt, int) and _is_time(expires)):
        raise Unauthorized("the key's payload is of another version of Leyden")
    return Claims(_SCOPES[body[3]], rollout_id, attempt, float(expires))


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def sign(secret: bytes, body: str) -> str:
    return _encode(hmac.digest(secret, body.encode(), "sha256"))


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
