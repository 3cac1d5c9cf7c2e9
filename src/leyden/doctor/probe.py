"""What a pod can reach. Runs in the pod from its own source, with Python 3.8 or newer and nothing else.

LEYDEN_PROBE says, as JSON, which gateways to ask, with the keys of which variables, and which other addresses to try.
The last line printed is the result, as JSON.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

REQUEST_S = 10.0
CONNECT_S = 4.0


def ask(url: str, key: str) -> dict[str, Any]:
    """What a gateway answers to a key that asks for the list of models, or why it does not."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    headers = {"Authorization": "Bearer " + key}
    request = urllib.request.Request(url + "/v1/models", headers=headers)  # noqa: S310  (the run file's)
    try:
        with opener.open(request, timeout=REQUEST_S) as answer:
            return {"status": answer.status, "text": ""}
    except urllib.error.HTTPError as error:
        return {"status": error.code, "text": error.read(300).decode("utf-8", "replace")}
    except (OSError, ValueError) as error:
        return {"status": None, "text": str(getattr(error, "reason", error)) or type(error).__name__}


def opens(address: str) -> bool:
    """Whether a TCP connection to `host:port` comes about."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        return True
    except (OSError, ValueError):
        return False


def main(environment: Mapping[str, str]) -> None:
    settings = json.loads(environment["LEYDEN_PROBE"])
    others = list(settings["others"])
    if environment.get("KUBERNETES_SERVICE_HOST"):
        others.append(environment["KUBERNETES_SERVICE_HOST"] + ":" + environment["KUBERNETES_SERVICE_PORT"])
    gateways: dict[str, Any] = {}
    opened: list[str] = []

    def try_gateway(url: str, variable: str) -> None:
        gateways[url] = ask(url, environment[variable])

    def try_other(address: str) -> None:
        if opens(address):
            opened.append(address)

    threads = [threading.Thread(target=try_gateway, args=pair) for pair in settings["gateways"].items()]
    threads += [threading.Thread(target=try_other, args=(address,)) for address in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"gateways": gateways, "open": sorted(opened)}))


if __name__ == "__main__":
    main(os.environ)
