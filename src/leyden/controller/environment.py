"""The environment of harnesses and graders: what of Leyden's own reaches them, and which hosts no proxy stands before.

A pure module: both backends use `reaching`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

INHERITED = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "TMPDIR", "LANG", "LANGUAGE", "LD_LIBRARY_PATH"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO"),
        "NODE_EXTRA_CA_CERTS",
    }
)
PROXIES = frozenset({"http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"})
EVERY_HOST = "*"


def inherited(parent: Mapping[str, str], named: Iterable[str]) -> dict[str, str]:
    """What every program needs of the environment that Leyden runs in, and what the run file names."""
    also = frozenset(named)
    return {n: v for n, v in parent.items() if n in INHERITED or n in also or n.startswith("LC_") or _is_proxy(n)}


def reaching(host: str, base: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """`base` with what the run file has `given` over it, so that `host` is reached without a proxy.

    Programs differ in which spelling of a proxy's variable they read. So a given one replaces the others of its name,
    and the exceptions of every spelling are told in both. `*`, which means every host, means so only alone.
    """
    replaced = {name.lower() for name in given if _is_proxy(name)}
    merged = {n: v for n, v in base.items() if n.lower() not in replaced} | dict(given)
    texts = [v for n, v in merged.items() if n.lower() == "no_proxy"]
    exceptions = [e for text in texts for e in re.split(r"[,\s]+", text) if e]
    told = EVERY_HOST if EVERY_HOST in exceptions else ",".join(dict.fromkeys([*exceptions, host]))
    others = {n: v for n, v in merged.items() if n.lower() != "no_proxy"}
    return others | {"NO_PROXY": told, "no_proxy": told}


def _is_proxy(name: str) -> bool:
    return name.lower() in PROXIES
