"""Who calls? One key in one of three headers, or in the query as Gemini's REST calls have it; what it may do is written
beside each route."""

from __future__ import annotations

import time
from collections.abc import Collection

from starlette.datastructures import Headers

from leyden.client import verify
from leyden.errors import Unauthorized
from leyden.types import Claims, Scope


def authenticate(headers: Headers, secret: bytes, scopes: Collection[Scope], *, in_query: str | None = None) -> Claims:
    """The claims of the caller's key; without one in the headers, of `in_query`. Raises Unauthorized: 401 without a
    valid key, 403 for another scope."""
    claims = verify(secret, _key(headers, in_query), time.time())
    if claims.scope not in scopes:
        allowed = " or ".join(sorted(scopes))
        raise Unauthorized(f"a {claims.scope} key may not do this; it takes a key of scope {allowed}", forbidden=True)
    return claims


def _key(headers: Headers, in_query: str | None) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    for name in ("x-api-key", "x-goog-api-key"):
        if headers.get(name):
            return headers[name]
    if in_query:
        return in_query
    raise Unauthorized("no key: send `Authorization: Bearer KEY`, `x-api-key` or `x-goog-api-key`")
