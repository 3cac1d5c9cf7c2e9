"""Credentials of service accounts, as pods have them."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path

import yaml

from tests.kube.cluster import Cluster


def kubeconfig_of(kube: Cluster, namespace: str, account: str, folder: Path) -> Path:
    """A kubeconfig with the token of a service account."""
    server = json.loads(kube.kubectl("config", "view", "--raw", "--minify", "-o", "json"))["clusters"][0]
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [server],
        "users": [{"name": account, "user": {"token": token(kube, namespace, account)}}],
        "contexts": [{"name": account, "context": {"cluster": server["name"], "user": account}}],
        "current-context": account,
    }
    path = folder / f"{account}.kubeconfig"
    path.write_text(yaml.safe_dump(document))
    return path


def token(kube: Cluster, namespace: str, account: str) -> str:
    """From the secret that clusters before 1.24 make a moment after the account, else made on request."""
    made = kube.kubectl("create", "token", account, "-n", namespace, check=False).strip()
    end = time.monotonic() + 30
    while not made:
        assert time.monotonic() < end, f"service account {account} gets no token"
        secrets = kube.get("serviceaccount", account, "-n", namespace).get("secrets") or []
        if secrets:
            found = kube.get("secret", secrets[0]["name"], "-n", namespace)["data"]["token"]
            made = base64.b64decode(found).decode()
        time.sleep(0.1)
    return made
