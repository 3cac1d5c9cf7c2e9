"""The files of deploy/ as objects, without kubectl: kustomizations here only list files, name images and make one
ConfigMap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
DEPLOY = Path(__file__).parents[2] / "deploy"


def kustomization(name: str) -> Object:
    document: Object = yaml.safe_load((DEPLOY / name / "kustomization.yaml").read_text())
    return document


def objects(*names: str) -> list[Object]:
    return [
        thing
        for name in names
        for resource in kustomization(name)["resources"]
        for thing in yaml.safe_load_all((DEPLOY / name / resource).read_text())
    ]


def one(things: list[Object], kind: str, name: str) -> Object:
    (found,) = [t for t in things if (t["kind"], t["metadata"]["name"]) == (kind, name)]
    return found


def pods(things: list[Object]) -> dict[str, Object]:
    """Pod templates by the name of what makes them."""
    return {t["metadata"]["name"]: t["spec"]["template"] for t in things if "template" in t.get("spec", {})}
