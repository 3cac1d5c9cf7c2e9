"""Is it the run's gateway that answers here? Asked before a key is sent, for another program may hold the port.

A key is CLAIMS-SIGNATURE, and only those who know the run's secret can make the signature from the claims. The caller
sends a nonce and the claims, `GET /health?nonce=...&claims=...`; the gateway answers an HMAC of the nonce, keyed by
that signature. So whoever holds a key can check it, without the secret of the run, and what it sends opens nothing.
"""

from __future__ import annotations

import hmac
import re
import secrets

import aiohttp
import orjson

from leyden.client.keys import MOST_KEY_CHARS, parts, sign
from leyden.errors import GatewayError

_NONCE = re.compile(r"[0-9a-f]{32,128}")
_PURPOSE = b"leyden gateway proof:"


class UnprovenGateway(GatewayError):
    """What answers at the address is not the gateway that issued the key, which was not sent."""


def proof(signature: str, nonce: str) -> str:
    return hmac.digest(signature.encode(), _PURPOSE + nonce.encode(), "sha256").hex()


def gateways_proof(secret: bytes, nonce: str, claims: str) -> str | None:
    """What the gateway of `secret` answers; None for a question that no client asks."""
    if not _NONCE.fullmatch(nonce) or not claims.isascii() or len(claims) > MOST_KEY_CHARS:
        return None
    return proof(sign(secret, claims), nonce)


async def prove(http: aiohttp.ClientSession, url: str, key: str) -> None:
    """Return if the gateway at `url` can have issued `key`. `http` must send no key by itself.

    Raises UnprovenGateway, or aiohttp.ClientConnectorError if nobody listens.
    """
    nonce = secrets.token_hex(32)
    claims, signature = parts(key)
    query = {"nonce": nonce, "claims": claims}
    try:
        async with http.get(f"{url}/health", params=query, allow_redirects=False) as response:
            status, raw = response.status, await response.content.read(4096)
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise _unproven(url, f"GET /health: {error or type(error).__name__}") from error
    said = _said(raw)
    if said is None:
        raise _unproven(url, f"GET /health is answered {status} without a proof")
    if not hmac.compare_digest(said.encode(), proof(signature, nonce).encode()):
        raise _unproven(url, "it has another secret: is LEYDEN_SECRET that of the gateway?")


def _said(raw: bytes) -> str | None:
    try:
        said = orjson.loads(raw)["proof"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return said if isinstance(said, str) else None


def _unproven(url: str, why: str) -> UnprovenGateway:
    return UnprovenGateway(
        f"what answers at {url} is not this run's gateway ({why}); no key was sent. Free the address for the gateway, "
        "or correct gateway.url; if the gateway listens elsewhere now, start this program again"
    )
