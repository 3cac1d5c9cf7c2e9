"""Jobs and Secrets from templates: names, variables, what strangers' values cannot do."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leyden.controller.backends.kubernetes.document import render_document
from leyden.controller.backends.kubernetes.manifest import Manifest, Pods, Program, is_ours, job_name, manifest
from leyden.errors import LaunchError

PODS = Pods(namespace="runs", keeper_image="leyden:1", keeper="print('keeper')")
PROGRAM = Program(
    job_id="step1-g0-m3.2",
    run="micro_swe",
    rollout_id="step1-g0-m3",
    attempt=2,
    url="http://gateway:8000",
    workspace_key="CANARY-workspace",
    deadline_s=900,
    known={
        "image": "agent:1",
        "command": ["mini", "--task", "cost: $(LEYDEN_KEY) $5"],
        "workspace": "/workspace",
        "resources": {"limits": {"memory": "1Gi"}},
        "task": {"v": "x", "n": 3},
    },
    env={"OPENAI_BASE_URL": "http://gateway:8000/v1", "PRICE": "$(LEYDEN_KEY)"},
    keys={"LEYDEN_KEY": "CANARY-agent", "OPENAI_API_KEY": "CANARY-agent"},
    archive=b"packed",
    files={"task.json": b"{}"},
)
CONTAINER = """
apiVersion: batch/v1
kind: Job
spec: {template: {spec: {containers: [{name: harness, image: a, env: [{name: V, value: %s}]}]}}}
"""


def main(made: Manifest, name: str = "harness") -> dict[str, Any]:
    (found,) = [c for c in made.job["spec"]["template"]["spec"]["containers"] if c["name"] == name]
    return found


def variables(container: dict[str, Any]) -> dict[str, Any]:
    names = [e["name"] for e in container["env"]]
    assert len(names) == len(set(names))
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in container["env"]}


def with_template(template: str, **known: Any) -> Manifest:
    return manifest(replace(PODS, template=template), replace(PROGRAM, known={**PROGRAM.known, **known}))


def test_the_default_template() -> None:
    made = manifest(PODS, PROGRAM)
    name = "micro-swe-step1-g0-m3-cc9470e698-2"
    spec = made.job["spec"]
    pod = spec["template"]["spec"]
    assert made.job["metadata"] == {
        "name": name,
        "namespace": "runs",
        "labels": {
            "app.kubernetes.io/managed-by": "leyden",
            "leyden/run": "micro_swe",
            "leyden/rollout": "step1-g0-m3",
            "leyden/attempt": "2",
            "leyden/job": "step1-g0-m3.2",
        },
        "annotations": {"leyden/job-id": "step1-g0-m3.2"},
    }
    assert spec["template"]["metadata"]["labels"] == made.job["metadata"]["labels"]
    assert {k: v for k, v in spec.items() if k != "template"} == {
        "backoffLimit": 0,
        "completions": 1,
        "parallelism": 1,
        "podReplacementPolicy": "Failed",
        "activeDeadlineSeconds": 900,
        "ttlSecondsAfterFinished": 3600,
    }
    assert (pod["restartPolicy"], pod["shareProcessNamespace"]) == ("Never", True)
    assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
    assert [c["name"] for c in pod["initContainers"]] == ["unpack"]
    assert [c["name"] for c in pod["containers"]] == ["keep", "harness"]
    harness = main(made)
    assert (harness["image"], harness["workingDir"]) == ("agent:1", "/workspace")
    assert harness["resources"] == {"limits": {"memory": "1Gi"}}
    assert harness["volumeMounts"] == [
        {"name": "leyden", "mountPath": "/workspace", "subPath": "workspace"},
        {"name": "leyden-files", "mountPath": "/leyden/files", "readOnly": True},
        {"name": "leyden", "mountPath": "/leyden/started", "subPath": "started", "readOnly": True},
    ]


def test_no_secret_in_the_job() -> None:
    """Keys come from the Secret; nothing that the harness mounts holds the keeper's key."""
    made = manifest(PODS, PROGRAM)
    assert "CANARY" not in json.dumps(made.job)
    assert "CANARY" not in repr(made) + repr(PROGRAM)
    name = job_name(PROGRAM)
    assert variables(main(made)) == {
        "OPENAI_BASE_URL": "http://gateway:8000/v1",
        "PRICE": "$$(LEYDEN_KEY)",
        "GIT_CONFIG_SYSTEM": "/leyden/files/gitconfig",
        "NO_PROXY": "gateway",
        "no_proxy": "gateway",
        "LEYDEN_KEY": {"secretKeyRef": {"name": name, "key": "LEYDEN_KEY"}},
        "OPENAI_API_KEY": {"secretKeyRef": {"name": name, "key": "OPENAI_API_KEY"}},
    }
    data = {n: base64.b64decode(v) for n, v in made.secret["data"].items()}
    assert data == {
        "LEYDEN_KEY": b"CANARY-agent",
        "OPENAI_API_KEY": b"CANARY-agent",
        "keeper-key": b"CANARY-workspace",
        "keeper.py": b"print('keeper')",
        "file-0": b"[include]\n\tpath = /etc/gitconfig\n[safe]\n\tdirectory = *\n",
        "file-1": b"{}",
        "workspace.tar.gz": b"packed",
    }
    volumes = {v["name"]: v for v in made.job["spec"]["template"]["spec"]["volumes"]}
    assert volumes["leyden-files"]["secret"]["items"] == [
        {"key": "file-0", "path": "gitconfig"},
        {"key": "file-1", "path": "task.json"},
    ]
    assert [i["key"] for i in volumes["leyden-in"]["secret"]["items"]] == ["keeper.py", "workspace.tar.gz"]


def test_a_printed_key_is_refused() -> None:
    with pytest.raises(LaunchError, match="the key LEYDEN_KEY is printed; it comes as a variable by itself"):
        with_template(CONTAINER % "{{ key }}", key="CANARY-agent")


def test_the_graders_job() -> None:
    """The grader gets the workspace from the gateway; nothing is saved after it."""
    made = manifest(PODS, replace(PROGRAM, grade=1, archive=None, job_id="step1-g0-m3.2.grade1"))
    pod = made.job["spec"]["template"]["spec"]
    assert [c["name"] for c in pod["initContainers"]] == ["fetch"]
    assert [c["name"] for c in pod["containers"]] == ["grader"]
    assert made.job["metadata"]["name"] == job_name(PROGRAM) + "-g1"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "True"),
        (None, "None"),
        (8080, "8080"),
        (1000.0, "1000.0"),
        ("1e3", "1e3"),
        ("null", "null"),
        ("yes", "yes"),
        ("08", "08"),
        ("", ""),
        ("~", "~"),
        ("2001-01-01", "2001-01-01"),
        ("a\n- b: c\t\x85\u2028é\U0001f600", "a\n- b: c\t\x85\u2028é\U0001f600"),
    ],
)
def test_environment_values_are_the_inputs_as_text(value: object, text: str) -> None:
    assert variables(main(with_template(CONTAINER % "{{ task.v }}", task={"v": value})))["V"] == text
    assert variables(main(with_template(CONTAINER % "'a {{ task.v }}'", task={"v": value})))["V"] == f"a {text}"


@pytest.mark.parametrize(
    ("written", "value"),
    [("8080", 8080), ("010", 8), ("true", True), ("yes", True), ("1.5", 1.5), ("null", None), ("[x]", ["x"])],
)
def test_an_unquoted_environment_value_is_refused(written: str, value: object) -> None:
    """The variable and its path are named."""
    where = re.escape(f"spec.template.spec.containers[0].env[0] (V): value {value!r} is not text; quote it")
    with pytest.raises(LaunchError, match=where):
        with_template(CONTAINER % written)


def test_leydens_variables_replace_the_templates_own_once() -> None:
    """In the harness, init containers and sidecars; only the harness gets those it does not name."""
    template = """
apiVersion: batch/v1
kind: Job
spec:
  template:
    spec:
      initContainers: [{name: prepare, image: a, env: [{name: OPENAI_BASE_URL, value: old}, {name: MINE, value: m}]}]
      containers:
      - {name: harness, image: a, env: [{name: LEYDEN_KEY, value: old}, {name: MINE, value: a}, {name: MINE, value: b}]}
      - {name: proxy, image: a, env: [{name: LEYDEN_KEY, value: old}]}
"""
    made = with_template(template)
    key = {"secretKeyRef": {"name": job_name(PROGRAM), "key": "LEYDEN_KEY"}}
    assert variables(main(made))["MINE"] == "b"
    assert variables(main(made))["LEYDEN_KEY"] == key
    assert variables(main(made, "proxy")) == {"LEYDEN_KEY": key}
    prepare = made.job["spec"]["template"]["spec"]["initContainers"][1]
    assert variables(prepare) == {"OPENAI_BASE_URL": "http://gateway:8000/v1", "MINE": "m"}


@pytest.mark.parametrize("quotes", ["{{ task.v }}", "'{{ task.v }}'", '"{{ task.v }}"', "a{{ task.v }}b"])
@pytest.mark.parametrize(
    "value",
    [
        "x, evil: true",
        "x}, {name: evil, value: y",
        "'}, {name: evil",
        '"}, {name: evil',
        "x\n      hostNetwork: true",
        "x #",
        "&a *a",
        "!!python/object/apply:os.system [id]",
        "{{ 7 * 7 }}",
        "LEYDEN0N0E",
        "\\",
        "- x",
        "|\n  y",
        "%YAML 1.1\n---\n",
    ],
)
def test_a_value_cannot_become_structure(quotes: str, value: str) -> None:
    """Whatever the template puts around it."""
    template = f"spec: {{containers: [{{name: harness, image: {quotes}}}, b], last: true}}"
    text = {"a{{ task.v }}b": f"a{value}b"}.get(quotes, value)
    assert render_document(template, {"task": {"v": value}}) == {
        "spec": {"containers": [{"name": "harness", "image": text}, "b"], "last": True}
    }


def test_a_value_in_a_block_of_text_stays_there() -> None:
    template = "args:\n- |\n  set -e\n  run {{ task.v }}\nlast: true\n"
    found = render_document(template, {"task": {"v": "a\nlast: false\n- b $(X)"}})
    assert found == {"args": ["set -e\nrun a\nlast: false\n- b $$(X)\n"], "last": True}


def test_kubernetes_expands_nothing_in_a_value() -> None:
    """`$(LEYDEN_KEY)` in a task would otherwise become the key, in an argument that everybody may read."""
    made = manifest(PODS, PROGRAM)
    assert main(made)["command"] == ["mini", "--task", "cost: $$(LEYDEN_KEY) $$5"]
    assert variables(main(with_template(CONTAINER % "'$(OWN) {{ task.v }}'", task={"v": "$(OWN)"})))["V"] == (
        "$(OWN) $$(OWN)"
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{% for i in range(999) %}{% for j in range(999) %}abc{% endfor %}{% endfor %}", "longer than 1048576"),
        ("{{ nothing }}", "'nothing' is undefined; known are task"),
        ("a: {{ task }}", "is not a scalar; print it with | structure"),
        ("a: [1", "is not YAML"),
        ("a: 1\na: 2", "key 'a' is given twice\n  in \"<unicode string>\", line 2, column 1"),
        (
            "a: 1\nb: !!timestamp 2001-01-01",
            "'tag:yaml.org,2002:timestamp'\n  in \"<unicode string>\", line 2, column 4",
        ),
        ("a: !!binary aGk=", "could not determine a constructor for the tag 'tag:yaml.org,2002:binary'"),
        ("a: !!set {b, c}", "could not determine a constructor for the tag 'tag:yaml.org,2002:set'"),
        ("a: 1\nb: !!int x", "'x' is no int\n  in \"<unicode string>\", line 2, column 4"),
        ("a: !!bool maybe", "'maybe' is no bool"),
        ("? [a]\n: b", "a key is no text"),
        ("a: " + "[" * 2000, "is not YAML"),
        ("{{ task.v }}: 1", "'x' is printed as a key; a key stands in the template"),
        ("labels: {a-{{ task.v }}: 1}", "'x' is printed as a key"),
        ("a: &x [1]\nb: [*x, *x]", "aliases are refused"),
        ("- 1", "holds list, not a Job"),
        (r'a: "\{{ task.v }}"', "a backslash stands before a printed value in double quotes; write two"),
        ("a: {% filter upper %}{{ task.v }}{% endfilter %}", "blocks of set and filter are refused"),
        ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ],
)
def test_templates_that_are_refused(template: str, message: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(message)):
        render_document(template, {"task": {"v": "x"}})


def test_values_keep_their_type_and_compare_as_themselves() -> None:
    template = "a: {{ n }}\nb: {{ l | structure }}\nc: {% if s == 'x' %}{{ s | upper }}{% endif %}\n"
    assert render_document(template, {"n": 3, "l": ["1", 2], "s": "x"}) == {"a": 3, "b": ["1", 2], "c": "X"}


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("2001-01-01", "2001-01-01"),
        ("2001-12-14t21:59:43.10-05:00", "2001-12-14t21:59:43.10-05:00"),
        ("1:30", "1:30"),
        ("22:22", "22:22"),
        ("1e3", "1e3"),
        (".nan", ".nan"),
        ("-.inf", "-.inf"),
        ("=", "="),
        ("08", "08"),
        ("!!str 010", "010"),
        ("0644", 0o644),
        ("0x1F", 31),
        ("1.5e+3", 1500.0),
        ("~", None),
        ("on", True),
    ],
)
def test_yaml_is_read_as_kubectl_reads_it(written: str, text: object) -> None:
    assert render_document(f"a: {written}\n2001-01-01: {{1: x, yes: x, 1.20: x, 08: x}}", {}) == {
        "a": text,
        "2001-01-01": {"1": "x", "yes": "x", "1.20": "x", "08": "x"},
    }


@pytest.mark.parametrize("quotes", ["${{ task.v }}", "$$${{ task.v }}", "$({{ task.v }})", "$(A{{ task.v }}"])
@pytest.mark.parametrize(
    "value", ["(LEYDEN_KEY)", "LEYDEN_KEY", "LEYDEN_KEY)", "$(LEYDEN_KEY)", "", "$", "$$(LEYDEN_KEY)"]
)
def test_no_reference_is_made_of_a_value_and_the_text_around_it(quotes: str, value: str) -> None:
    """What Kubernetes makes of it is the template with the value in it, and the template's own `$$` as one `$`."""
    template = f"env: [{{name: V, value: 'cost $5 $(OWN) {quotes}) $'}}]\nargs: ['{quotes}) $(OWN)']"
    made = render_document(template, {"task": {"v": value}})
    meant = quotes.replace("$$", "$").replace("{{ task.v }}", value)
    assert expanded(made["env"][0]["value"]) == f"cost $5 <OWN> {meant}) $"
    assert expanded(made["args"][0]) == f"{meant}) <OWN>"


def expanded(text: str) -> str:
    """As Kubernetes does it, with every name known; see its third_party/forked/golang/expansion."""
    return re.sub(r"\$(\$|\(([^)]*)\))", lambda m: "$" if m[1] == "$" else f"<{m[2]}>", text)


def test_structure_is_only_values_too() -> None:
    task = {"env": [{"name": "A", "value": "$(LEYDEN_KEY)"}], "main": {"args": ["$(LEYDEN_KEY)"], "image": "a$b"}}
    made = render_document("env: {{ task.env | structure }}\nc: {{ task.main | structure }}", {"task": task})
    assert made == {
        "env": [{"name": "A", "value": "$$(LEYDEN_KEY)"}],
        "c": {"args": ["$$(LEYDEN_KEY)"], "image": "a$b"},
    }


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{kind: Pod, apiVersion: v1}", "apiVersion 'v1', kind 'Pod'; it must be a Job of batch/v1"),
        ("{kind: Job, apiVersion: batch/v1, spec: 3}", "spec is 3, not a mapping"),
        (
            CONTAINER.replace("name: harness", "name: agent") % "x",
            "spec.template.spec.containers are ['agent']; one must be 'harness'",
        ),
        (CONTAINER.replace("image: a", "image: a}, {name: keep") % "x", "containers: 'keep' is a name of Leyden's own"),
        (CONTAINER.replace("image: a", "image: a}, {name: harness") % "x", "one must be 'harness'"),
        (CONTAINER.replace("image: a", "image: a}, {name: b}, {name: b") % "x", "containers: 'b' is given twice"),
        (
            CONTAINER.replace("spec: {containers", "spec: {volumes: [{name: leyden-in}], containers") % "x",
            "volumes: 'leyden-in' is a name of Leyden's own",
        ),
        (CONTAINER.replace("name: V, ", "") % "x", "containers[0].env[0]: {'value': 'x'} has no name"),
    ],
)
def test_jobs_that_are_refused(template: str, message: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(message)):
        with_template(template)


def test_git_s_setting_is_the_template_s_own_where_it_has_one() -> None:
    template = CONTAINER.replace("name: V", "name: GIT_CONFIG_SYSTEM") % "/mine"
    assert variables(main(with_template(template)))["GIT_CONFIG_SYSTEM"] == "/mine"


def test_git_works_in_a_workspace_of_another_user(tmp_path: Path) -> None:
    made = manifest(PODS, PROGRAM)
    (tmp_path / "gitconfig").write_bytes(base64.b64decode(made.secret["data"]["file-0"]))
    repository = tmp_path / "repository"
    subprocess.run(["git", "init", "-q", repository], check=True)
    another = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "GIT_TEST_ASSUME_DIFFERENT_OWNER": "1"}

    def status(**more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", "status", "-s"], cwd=repository, env=another | more, capture_output=True, text=True, check=False
        )

    assert "dubious ownership" in status().stderr
    assert status(GIT_CONFIG_SYSTEM=str(tmp_path / "gitconfig")).returncode == 0


@pytest.mark.parametrize(
    ("template", "given", "told", "proxies"),
    [
        ({"NO_PROXY": "internal.corp"}, {}, "internal.corp,gateway", {}),
        ({"no_proxy": "a b", "NO_PROXY": "c"}, {}, "a,b,c,gateway", {}),
        ({"No_Proxy": "$(HERE)"}, {}, "$(HERE),gateway", {}),
        ({"NO_PROXY": "*"}, {}, "*", {}),
        ({"http_proxy": "p"}, {"HTTP_PROXY": "q", "no_proxy": "x"}, "x,gateway", {"HTTP_PROXY": "q"}),
        ({"NO_PROXY": "theirs"}, {"no_proxy": "mine"}, "mine,gateway", {}),
    ],
)
def test_no_proxy_stands_before_the_gateway(
    template: dict[str, str], given: dict[str, str], told: str, proxies: dict[str, str]
) -> None:
    """What the template and `harness.env` except is excepted too, in every spelling; the run file's word counts."""
    env = ", ".join(f'{{name: {n}, value: "{v}"}}' for n, v in {"HERE": "here", **template}.items())
    text = CONTAINER.replace("{name: V, value: %s}", env)
    made = manifest(replace(PODS, template=text), replace(PROGRAM, env=given))
    found = {n: v for n, v in variables(main(made)).items() if n.lower().endswith("_proxy")}
    assert found == {"NO_PROXY": told, "no_proxy": told, **proxies}
    names = list(variables(main(made)))
    assert names.index("HERE") < names.index("NO_PROXY")


def test_the_keeper_stands_directly_before_the_harness() -> None:
    """What the template starts before the harness still starts before it, what it starts after it after it."""
    template = CONTAINER.replace("[{name: harness", "[{name: first}, {name: harness").replace(
        "%s}]}]", "x}]}, {name: last}]"
    )
    pod = with_template(template).job["spec"]["template"]["spec"]
    assert [c["name"] for c in pod["containers"]] == ["first", "keep", "harness", "last"]


def test_any_file_name_may_lie_in_the_pod() -> None:
    """Whatever a Secret's keys may be, and whatever else it holds."""
    files = {"a b.py": b"1", "keeper.py": b"2", "LEYDEN_KEY": b"3", "é": b"4"}
    made = manifest(PODS, replace(PROGRAM, files=files))
    volumes = {v["name"]: v for v in made.job["spec"]["template"]["spec"]["volumes"]}
    data = {k: base64.b64decode(v) for k, v in made.secret["data"].items()}
    assert all(re.fullmatch(r"[-._a-zA-Z0-9]+", key) for key in data)
    found = {i["path"]: data[i["key"]] for i in volumes["leyden-files"]["secret"]["items"]}
    assert {name: found[name] for name in files} == files
    assert data["LEYDEN_KEY"] == b"CANARY-agent" and data["keeper.py"] == b"print('keeper')"


LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@pytest.mark.parametrize("rollout_id", ["a", "A", "_-_", "x" * 200, "Step_1", "step-1", "-", "0"])
def test_names_are_dns_labels(rollout_id: str) -> None:
    name = job_name(replace(PROGRAM, run="R" * 100, rollout_id=rollout_id, attempt=999, grade=99, again=9))
    assert LABEL.fullmatch(name)
    made = manifest(PODS, replace(PROGRAM, rollout_id=rollout_id, job_id=f"{rollout_id}.2", run="/a b/" * 30))
    for value in made.job["metadata"]["labels"].values():
        assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", value)


def test_names_are_never_used_twice() -> None:
    """Each attempt, try and repetition has its own; ids that look alike do not share one."""
    made: list[Callable[[Program], Program]] = [
        lambda p: p,
        lambda p: replace(p, attempt=3),
        lambda p: replace(p, grade=1),
        lambda p: replace(p, grade=2),
        lambda p: replace(p, again=1),
        lambda p: replace(p, run="micro-swe"),
        lambda p: replace(p, rollout_id="Step1-g0-m3"),
        lambda p: replace(p, rollout_id="step1_g0_m3"),
    ]
    assert len({job_name(change(PROGRAM)) for change in made}) == len(made)
    assert job_name(PROGRAM) == job_name(replace(PROGRAM, known={}))


def test_adoption() -> None:
    """A Job of this attempt is ours, whatever else was put on it; another one is not."""
    job = manifest(PODS, PROGRAM).job
    job["metadata"]["labels"]["other"] = "x"
    assert is_ours(job, PROGRAM)
    assert not is_ours(job, replace(PROGRAM, attempt=3, job_id="step1-g0-m3.3"))
    assert not is_ours(job, replace(PROGRAM, run="another"))
    assert not is_ours({"metadata": {"name": job["metadata"]["name"]}}, PROGRAM)


def test_the_ttl_has_a_minimum() -> None:
    """A finished Job outlives a controller's restart."""
    template = CONTAINER.replace("spec: {template", "spec: {ttlSecondsAfterFinished: 0, template") % "x"
    assert with_template(template).job["spec"]["ttlSecondsAfterFinished"] == 3600
    template = template.replace("Finished: 0", "Finished: 5")
    assert with_template(template).job["spec"]["ttlSecondsAfterFinished"] == 300


def test_a_workspace_too_large_for_a_secret() -> None:
    with pytest.raises(LaunchError, match=r"are 1000\d\d\d bytes; a Secret holds 1000000: put what all tasks share"):
        manifest(PODS, replace(PROGRAM, archive=b"x" * 1_000_000))
