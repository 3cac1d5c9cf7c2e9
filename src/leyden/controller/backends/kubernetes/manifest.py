"""A template and an attempt -> Job and Secret. Pure.

Completion sets what Leyden counts on: the name, labels, one try, deadline, TTL, keys from the Secret, the workspace
volume, the init container that fills it and the sidecar that saves it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from leyden.controller.backends.kubernetes.document import render_document, unexpanded
from leyden.controller.backends.kubernetes.keeper import STARTED, STARTED_AT
from leyden.controller.backends.kubernetes.keeper_end import KEEPER
from leyden.controller.backends.kubernetes.objects import Object
from leyden.controller.environment import reaching
from leyden.errors import LaunchError

LEAST_TTL_S = 300
MOST_SECRET_BYTES = 1_000_000
JOB_ID = "leyden/job-id"
WORKSPACE = "/workspace"
FILES = "/leyden/files"
_INPUT = "/leyden/in"
_VOLUME = "/leyden/volume"
_KEEPER_FILE = "keeper.py"
_ARCHIVE = "workspace.tar.gz"
_KEEPER_KEY = "keeper-key"
_GITCONFIG = "gitconfig"
_NAME_PART = 20
_VOLUMES = ("leyden", "leyden-in", "leyden-files")
_DEFAULTS = {"GIT_CONFIG_SYSTEM": f"{FILES}/{_GITCONFIG}"}
# The workspace is the keeper's; git works in one of another user's only where it is told that this is meant.
_GIT = b"[include]\n\tpath = /etc/gitconfig\n[safe]\n\tdirectory = *\n"

TEMPLATE = """\
apiVersion: batch/v1
kind: Job
spec:
  template:
    spec:
      containers:
      - name: {{ container }}
        image: {{ image }}
        command: {{ command | structure }}
        securityContext:
          allowPrivilegeEscalation: false
          capabilities: {drop: [AUDIT_WRITE, MKNOD, NET_RAW, SETFCAP, SETPCAP, SYS_CHROOT]}
          seccompProfile: {type: RuntimeDefault}
        workingDir: {{ workspace }}
        resources: {{ resources | structure }}
"""


@dataclass(frozen=True, slots=True)
class Program:
    """What a Job runs. `known` is what the template may print; `env` values are plain, `keys` go to the Secret.

    `files` lie read-only in FILES, `archive` (tar.gz) is unpacked into WORKSPACE before the start; without one the
    workspace is fetched from the gateway with `workspace_key`, with one it is saved there at the end. `deadline_s`
    counts from the Job's creation. `grade` counts tries of the grader from 1; 0 is the harness.
    """

    job_id: str
    run: str
    rollout_id: str
    attempt: int
    url: str
    workspace_key: str = field(repr=False)
    deadline_s: int
    known: Mapping[str, Any]
    env: Mapping[str, str]
    keys: Mapping[str, str] = field(repr=False)
    grade: int = 0
    archive: bytes | None = field(default=None, repr=False)
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    again: int = 0

    @property
    def container(self) -> str:
        return "grader" if self.grade else "harness"


@dataclass(frozen=True, slots=True)
class Pods:
    """How pods are made in this run. `keeper` is the keeper's source, `keeper_image` any image with Python 3.8.

    `ttl_s` is how long a finished Job stays if nobody deletes it; `grace_s` how long a killed pod has to save.
    """

    namespace: str
    keeper_image: str
    keeper: str = field(repr=False)
    template: str = TEMPLATE
    ttl_s: int = 3600
    grace_s: int = 60
    workspace_bytes: int = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Manifest:
    job: Object
    secret: Object = field(repr=False)


def manifest(pods: Pods, program: Program) -> Manifest:
    """Raises LaunchError naming the path in the document and the value."""
    document = render_document(pods.template, {**program.known, "container": program.container})
    name = job_name(program)
    job = _complete(document, pods, program, name)
    clear = json.dumps(job)
    for variable, value in {**program.keys, _KEEPER_KEY: program.workspace_key}.items():
        if value and value in clear:
            raise LaunchError(f"kubernetes.template: the key {variable} is printed; it comes as a variable by itself")
    return Manifest(job, _secret(pods, program, name))


def job_name(program: Program) -> str:
    """A DNS label that no other attempt has: readable parts, a hash of the exact ids, attempt, try, repetition."""
    exact = hashlib.sha256(f"{program.run}\0{program.rollout_id}".encode()).hexdigest()[:10]
    parts = [_slug(program.run), _slug(program.rollout_id), exact, str(program.attempt)]
    if program.grade:
        parts.append(f"g{program.grade}")
    if program.again:
        parts.append(f"r{program.again}")
    return "-".join(p for p in parts if p)


def labels(program: Program) -> dict[str, str]:
    return {
        "app.kubernetes.io/managed-by": "leyden",
        "leyden/run": label(program.run),
        "leyden/rollout": label(program.rollout_id),
        "leyden/attempt": str(program.attempt),
        "leyden/job": label(program.job_id),
    }


def label(text: str) -> str:
    """`text` as a label's value: itself if it is one, else its beginning and a hash."""
    if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", text):
        return text
    return f"{_slug(text) or 'x'}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def is_ours(job: Object, program: Program) -> bool:
    """Whether a Job that exists under our name is this program's own, from a create whose answer was lost."""
    metadata = job["metadata"]
    wanted = {**labels(program), JOB_ID: program.job_id}
    return wanted.items() <= {**metadata.get("labels", {}), **metadata.get("annotations", {})}.items()


def _complete(document: Object, pods: Pods, program: Program, name: str) -> Object:
    if (document.get("apiVersion"), document.get("kind")) != ("batch/v1", "Job"):
        raise LaunchError(
            f"kubernetes.template: apiVersion {document.get('apiVersion')!r}, kind {document.get('kind')!r}; "
            "it must be a Job of batch/v1"
        )
    spec = _mapping(document, "spec")
    pod_template = _mapping(spec, "template", "spec.")
    pod = _mapping(pod_template, "spec", "spec.template.")
    metadata = _mapping(document, "metadata")
    metadata |= {"name": name, "namespace": pods.namespace}
    own = {JOB_ID: program.job_id}
    for holder, path in ((metadata, "metadata."), (_mapping(pod_template, "metadata"), "spec.template.metadata.")):
        holder["labels"] = {**_mapping(holder, "labels", path), **labels(program)}
        holder["annotations"] = {**_mapping(holder, "annotations", path), **own}
    spec |= {"backoffLimit": 0, "completions": 1, "parallelism": 1, "podReplacementPolicy": "Failed"}
    spec["activeDeadlineSeconds"] = program.deadline_s
    spec["ttlSecondsAfterFinished"] = max(LEAST_TTL_S, spec.get("ttlSecondsAfterFinished") or pods.ttl_s)
    pod |= {"restartPolicy": "Never", "shareProcessNamespace": True}
    pod.setdefault("automountServiceAccountToken", False)
    pod.setdefault("enableServiceLinks", False)
    pod["terminationGracePeriodSeconds"] = max(pods.grace_s, pod.get("terminationGracePeriodSeconds") or 0)
    _complete_containers(pod, pods, program, name)
    return document


def _complete_containers(pod: Object, pods: Pods, program: Program, name: str) -> None:
    theirs = {
        kind: _containers(pod, kind) for kind in ("initContainers", "containers") if kind == "containers" or kind in pod
    }
    main = [c for c in theirs["containers"] if c.get("name") == program.container]
    if len(main) != 1:
        names = [c.get("name") for c in theirs["containers"]]
        raise LaunchError(
            f"kubernetes.template: spec.template.spec.containers are {names}; one must be {program.container!r}"
        )
    _refuse_our_names([c for found in theirs.values() for c in found], _list(pod, "volumes", "spec.template.spec."))
    variables = _variables(program, name)
    for kind, containers in theirs.items():
        for i, container in enumerate(containers):
            path = f"spec.template.spec.{kind}[{i}]"
            own = _environment(container, path, variables)
            container["env"] = list((_whole(own, variables, program) if container is main[0] else own).values())
    mounts = [_mount("leyden", WORKSPACE, subPath="workspace"), _mount("leyden-files", FILES, readOnly=True)]
    if not program.grade:
        mounts.append(_mount("leyden", STARTED_AT, subPath=STARTED, readOnly=True))
    _set_mounts(main[0], mounts)
    pod["volumes"] = [*_list(pod, "volumes", "spec.template.spec."), *_volumes(pods, program, name)]
    pod["initContainers"] = [_before(pods, program, name), *theirs.get("initContainers", [])]
    if not program.grade:
        # Before the harness: containers start one after the other, and the keeper must watch by then.
        place = theirs["containers"].index(main[0])
        theirs["containers"].insert(place, _keeper(pods, program, name))
    pod["containers"] = theirs["containers"]


def _refuse_our_names(containers: list[Object], volumes: list[Any]) -> None:
    for kind, things, ours in (
        ("containers", containers, ("fetch", "unpack", KEEPER)),
        ("volumes", [v for v in volumes if isinstance(v, dict)], _VOLUMES),
    ):
        names = [thing.get("name") for thing in things]
        for found in names:
            if found in ours or names.count(found) > 1:
                why = "is a name of Leyden's own" if found in ours else "is given twice"
                raise LaunchError(f"kubernetes.template: {kind}: {found!r} {why}; take another one")


def _variables(program: Program, name: str) -> dict[str, Object]:
    plain = {n: {"name": n, "value": unexpanded(v)} for n, v in program.env.items()}
    keys = {n: {"name": n, "valueFrom": _from_secret(name, n)} for n in program.keys}
    return plain | keys


def _environment(container: Object, path: str, variables: Mapping[str, Object]) -> dict[str, Object]:
    """The container's own variables with Leyden's in their place; one of each name, the last one counts."""
    merged: dict[str, Object] = {}
    for i, entry in enumerate(_list(container, "env", f"{path}.")):
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not name:
            raise LaunchError(f"kubernetes.template: {path}.env[{i}]: {entry!r:.200} has no name")
        value = entry.get("value", "")
        if not isinstance(value, str):
            raise LaunchError(f"kubernetes.template: {path}.env[{i}] ({name}): value {value!r} is not text; quote it")
        merged.pop(name, None)
        merged[name] = variables.get(name, entry)
    return merged


def _whole(own: Mapping[str, Object], variables: Mapping[str, Object], program: Program) -> dict[str, Object]:
    """The main container's variables, the template's `own` first: all of Leyden's too, and no proxy before the gateway,
    whatever the template or the run file say of proxies."""
    entries = {n: {"name": n, "value": v} for n, v in _DEFAULTS.items()} | dict(own) | dict(variables)
    plain = {n: e.get("value", "") for n, e in entries.items() if "valueFrom" not in e}
    base = {n: v for n, v in plain.items() if n not in program.env}
    reached = reaching(urlsplit(program.url).hostname or "", base, {n: plain[n] for n in program.env if n in plain})
    kept = {n: e for n, e in entries.items() if n not in plain or n in reached}
    return kept | {n: {"name": n, "value": v} for n, v in reached.items()}


def _before(pods: Pods, program: Program, name: str) -> Object:
    """The init container that fills the workspace: from the Secret, or for a grader from the gateway."""
    if program.archive is None:
        return _leyden_container(pods, "fetch", program, name)
    made = _leyden_container(pods, "unpack", program, name)
    return {**made, "env": [e for e in made["env"] if "value" in e]}


def _keeper(pods: Pods, program: Program, name: str) -> Object:
    """Its postStart hook holds the harness back until the keeper watches."""
    hook = {"postStart": {"exec": {"command": ["python3", f"{_INPUT}/{_KEEPER_FILE}", "ready"]}}}
    return _leyden_container(pods, KEEPER, program, name) | {"lifecycle": hook}


def _leyden_container(pods: Pods, do: str, program: Program, name: str) -> Object:
    return {
        "name": do,
        "image": pods.keeper_image,
        "command": ["python3", f"{_INPUT}/{_KEEPER_FILE}", do],
        "env": [
            {"name": "LEYDEN_URL", "value": unexpanded(program.url)},
            {"name": "LEYDEN_WORKSPACE_KEY", "valueFrom": _from_secret(name, _KEEPER_KEY)},
            {"name": "LEYDEN_WORKSPACE_BYTES", "value": str(pods.workspace_bytes)},
            {"name": "LEYDEN_SAVE_S", "value": str(max(1, pods.grace_s // 2))},
        ],
        "volumeMounts": [_mount("leyden", _VOLUME), _mount("leyden-in", _INPUT, readOnly=True)],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "256Mi"}},
    }


def _volumes(pods: Pods, program: Program, name: str) -> list[Object]:
    """The workspace with room for its archive; the keeper's input; the files of the harness, without any key."""
    given = [_KEEPER_FILE, *([_ARCHIVE] if program.archive is not None else [])]
    files = [{"key": _file_key(i), "path": name_} for i, name_ in enumerate(_files(program))]
    return [
        {"name": "leyden", "emptyDir": {"sizeLimit": str(2 * pods.workspace_bytes)}},
        {"name": "leyden-in", "secret": {"secretName": name, "items": [{"key": k, "path": k} for k in given]}},
        {"name": "leyden-files", "secret": {"secretName": name, "items": files}},
    ]


def _files(program: Program) -> dict[str, bytes]:
    """What lies in FILES, by name, in order."""
    return dict(sorted({**program.files, _GITCONFIG: _GIT}.items()))


def _file_key(number: int) -> str:
    """A file's key in the Secret, which has stricter names than a folder, and holds more than files."""
    return f"file-{number}"


def _secret(pods: Pods, program: Program, name: str) -> Object:
    """Everything secret or large; the API adds the Job as its owner."""
    texts = {**program.keys, _KEEPER_KEY: program.workspace_key, _KEEPER_FILE: pods.keeper}
    data = {n: text.encode() for n, text in texts.items()}
    data |= {_file_key(i): content for i, content in enumerate(_files(program).values())}
    if program.archive is not None:
        data[_ARCHIVE] = program.archive
    size = sum(map(len, data.values()))
    if size > MOST_SECRET_BYTES:
        raise LaunchError(
            f"the workspace, packed, and the task are {size} bytes; a Secret holds {MOST_SECRET_BYTES}: put what all "
            "tasks share into the image"
        )
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {
            "name": name,
            "namespace": pods.namespace,
            "labels": labels(program),
            "annotations": {JOB_ID: program.job_id},
        },
        "data": {n: base64.b64encode(content).decode() for n, content in sorted(data.items())},
    }


def _from_secret(name: str, key: str) -> Object:
    return {"secretKeyRef": {"name": name, "key": key}}


def _mount(volume: str, path: str, **more: Any) -> Object:
    return {"name": volume, "mountPath": path, **more}


def _set_mounts(container: Object, mounts: list[Object]) -> None:
    container["volumeMounts"] = [*_list(container, "volumeMounts", "containers."), *mounts]


def _containers(pod: Object, kind: str) -> list[Object]:
    found = _list(pod, kind, "spec.template.spec.")
    for i, container in enumerate(found):
        if not isinstance(container, dict):
            raise LaunchError(
                f"kubernetes.template: spec.template.spec.{kind}[{i}] is {container!r:.200}, no container"
            )
    return found


def _mapping(holder: Object, key: str, path: str = "") -> Object:
    value = holder.setdefault(key, {})
    if value is None:
        value = holder[key] = {}
    if not isinstance(value, dict):
        raise LaunchError(f"kubernetes.template: {path}{key} is {value!r:.200}, not a mapping")
    return value


def _list(holder: Object, key: str, path: str) -> list[Any]:
    value = holder.get(key) or []
    if not isinstance(value, list):
        raise LaunchError(f"kubernetes.template: {path}{key} is {value!r:.200}, not a list")
    return value


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:_NAME_PART].strip("-")
