from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leyden.config import RunConfig
from leyden.controller import grade, workspace
from leyden.controller.backends.leyden_launcher.huge_pages import areas
from leyden.controller.backends.local_jobs import local_jobs
from leyden.controller.launch import RunFacts
from leyden.controller.paths import attempt_paths
from leyden.controller.templates import render
from leyden.errors import LaunchError
from tests.controller.test_plan import rollout

Config = Callable[..., RunConfig]
URL = "http://127.0.0.1:8123"


def test_harness_gets_keys_and_addresses_of_every_family(config: Config, tmp_path: Path) -> None:
    made = config(
        harness={
            "command": ["agent", "--task", "{{ task.prompt }}", "-m", "openai/{{ model }}"],
            "env": {"CFG": "{{ config_dir }}/x.yaml", "WHO": "{{ rollout_id }}", "AT": "{{ url }}/v1"},
        }
    )
    parent = {"PATH": "/bin", "LEYDEN_SECRET": "s", "OPENAI_API_KEY": "users-own", "NO_PROXY": "a,b"}
    job = local_jobs(made, URL, parent).harness(
        rollout("r1", attempt=2, task={"prompt": "fix; rm -rf $HOME"}), "lk-a-1"
    )
    root = tmp_path / "run/attempts/r1/2"
    assert job.argv == ("agent", "--task", "fix; rm -rf $HOME", "-m", "openai/policy")
    assert (job.job_id, job.directory, job.cwd, job.log) == ("r1.2", root, root / "workspace", root / "harness.log")
    assert job.env == {
        "PATH": "/bin",
        "NO_PROXY": "a,b,127.0.0.1",
        "no_proxy": "a,b,127.0.0.1",
        "OPENAI_API_KEY": "lk-a-1",
        "OPENAI_BASE_URL": f"{URL}/v1",
        "OPENAI_API_BASE": f"{URL}/v1",
        "ANTHROPIC_API_KEY": "lk-a-1",
        "ANTHROPIC_AUTH_TOKEN": "lk-a-1",
        "ANTHROPIC_BASE_URL": URL,
        "GEMINI_API_KEY": "lk-a-1",
        "GOOGLE_API_KEY": "lk-a-1",
        "GOOGLE_GEMINI_BASE_URL": URL,
        "LEYDEN_URL": URL,
        "LEYDEN_KEY": "lk-a-1",
        "LEYDEN_ROLLOUT_ID": "r1",
        "LEYDEN_ATTEMPT": "2",
        "LEYDEN_MODEL": "policy",
        "LEYDEN_TASK": str(root / "task.json"),
        "LEYDEN_WORKSPACE": str(root / "workspace"),
        "PWD": str(root / "workspace"),
        "CFG": f"{tmp_path}/x.yaml",
        "WHO": "r1",
        "AT": f"{URL}/v1",
    }
    assert "lk-a-1" not in repr(job)


def test_grader_gets_its_own_key_and_no_model(config: Config, tmp_path: Path) -> None:
    made = config(grader={"function": "m:f"})
    job = local_jobs(made, URL, {"LEYDEN_KEY": "agent"}).grader(rollout("r1"), "lk-g-1", 2)
    root = tmp_path / "run/attempts/r1/1"
    assert job.argv == (sys.executable, grade.__file__, "m:f", str(tmp_path))
    assert job.job_id == "r1.1.grade2" and job.fork and job.directory == root / "grade"
    assert job.env["LEYDEN_KEY"] == "lk-g-1" and job.env["LEYDEN_REWARD_URL"] == f"{URL}/api/reward"
    assert job.env["LEYDEN_EXIT"] == str(root / "exit.json")
    assert job.env["LEYDEN_HARNESS_LOG"] == str(root / "harness.log")
    assert not {n for n in job.env if n.startswith(("OPENAI", "ANTHROPIC", "GEMINI", "GOOGLE"))}


def test_launcher_sees_what_does_not_name_a_task_and_no_key(config: Config) -> None:
    made = config(harness={"env": {"A": "{{ model }}", "B": "{{ task.x }}", "C": "{{ workspace }}/c", "D": "1"}})
    seen = local_jobs(made, URL, {"LEYDEN_SECRET": "s"}).preload_environment()
    assert (seen["A"], seen["D"], seen["OPENAI_BASE_URL"]) == ("policy", "1", f"{URL}/v1")
    assert not {"B", "C", "LEYDEN_SECRET", "LEYDEN_KEY", "OPENAI_API_KEY"} & set(seen)


HOSTILE = {"long": "a" * 1_000_000, "many": ["x"] * 3000, "n": 9_999_999_999, "deep": [["x"] * 20_000]}
for _ in range(90):
    HOSTILE["deep"] = [HOSTILE["deep"]]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ promt }}", "harness.command.3.: 'promt' is undefined; known are task"),
        ("{{ task.promt }}", "has no attribute 'promt'"),
        ("{{ task", "the template .* cannot be rendered"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ task.clear() }}", "attribute .clear. of .dict. object is unsafe"),
        ("{% for i in range(100000000) %}x{% endfor %}", "range of 100000000 numbers; at most 1000"),
        (
            "{% for i in range(999) %}" * 3 + "{% endfor %}" * 3,
            "loops are nested deeper than 2",
        ),
        ("{% for i in range(999) %}{% for j in range(999) %}abc{% endfor %}{% endfor %}", "longer than 1048576"),
        ("{{ 'a' * 1000000000 }}", r"\* is only for small numbers"),
        ("{{ 9 ** 999999999 }}", r"\*\* is only for small numbers"),
        ("{{ '%9999999999d' % 1 }}", "% is only for small numbers"),
        ("{{ task.long | replace('a', task.long) }}", "replace would make 1000000000000 characters; at most 1048576"),
        ("{{ task.long.replace('a', task.long) }}", "replace would make 1000000000000 characters"),
        ("{{ task.long.replace('', task.long) }}", "replace would make 1000002000000 characters"),
        ("{{ task.many | join(task.long) }}", "join would make"),
        ("{{ task.long.join(task.many) }}", "join would make"),
        ("{{ 'a'.ljust(task.n) }}", "attribute 'ljust' of 'str' object is unsafe"),
        ("{{ 'a'.zfill(task.n) }}", "unsafe"),
        ("{{ '{:>9999999999}'.format(1) }}", "the method format is refused"),
        ("{{ '%9d' | format(1) }}", "No filter named 'format'"),
        ("{{ 'a' | center(task.n) }}", "No filter named 'center'"),
        ("{{ task.many | batch(task.n, 'x') | list }}", "No filter named 'batch'"),
        ("{{ task | tojson(task.n) }}", "tojson with an indent of 9999999999; at most 15"),
        ("{{ task.deep | tojson(9) }}", "tojson would make"),
        ("{{ 1 | round(task.n) }}", "round to 9999999999 digits"),
        ("{{ (1).to_bytes(task.n) }}", "unsafe"),
        ("{% for a in task.many %}{% for b in task.many %}{% endfor %}{% endfor %}", "more than 1000000 rounds"),
        ("{% set x %}{% for a in range(9) %}{{ a }}{% endfor %}{% endset %}", "blocks of set and filter are refused"),
        ("{% filter upper %}x{% endfilter %}", "blocks of set and filter are refused"),
        ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "macros, calls and recursive loops are refused"),
        ("{% for x in task recursive %}{{ loop(task) }}{% endfor %}", "macros, calls and recursive loops are refused"),
    ],
)
def test_templates_are_strict_and_bounded(template: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        render("harness.command[3]", template, {"task": {"prompt": "x", **HOSTILE}})


def test_templates_render_text_as_it_is() -> None:
    """What a task holds is printed, never rendered."""
    known = {"task": {"prompt": "<a> & {{ b }}\n", "n": 3, "l": ["x", "y"]}}
    assert (
        render("t", "{{ task.prompt }}|{{ task.n * 2 }}|{{ task.l | join(',') }}\n", known) == "<a> & {{ b }}\n|6|x,y\n"
    )


@pytest.mark.parametrize("text", ["echo ${#a[@]}", "awk '{# c' x", "{# not a comment #}", "{#", "#}", "a{#b#}c"])
def test_a_command_has_no_comments(text: str) -> None:
    assert render("harness.command[0]", text, {}) == text


def test_what_is_bounded_still_works() -> None:
    task = {"a": "x/y", "l": ["p", 1, None], "d": {"k": "v"}, "n": 2.345, "f": [{"s": "é"}, {"s": "t"}]}
    known = {"task": task}
    for template, text in {
        "{{ task.a | replace('/', '__') }}{{ task.a.replace('/', '', 1) }}": "x__yxy",
        "{{ task.l | join(',') }} {{ '-'.join(['a', 'b']) }}{{ task.f | join('+', attribute='s') }}": "p,1,None a-bé+t",
        "{{ task.d | tojson }}{{ task.f | tojson }}": '{"k": "v"}[{"s": "\\u00e9"}, {"s": "t"}]',
        "{{ task.n | round(1) }} {{ task.a.split('/')[0] | upper }}{{ task.f | map(attribute='s') | list | length }}": (
            "2.3 X2"
        ),
        "{% for x in task.l %}{{ loop.index }}{{ x }}{% else %}-{% endfor %}{{ task.x | default('d') }}": "1p213Noned",
    }.items():
        assert render("t", template, known) == text


@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("{{ task.t }}", "/etc"),
        ("{{ task.t }}", ".."),
        ("repos/{{ task.t }}", "../other"),
        ("repos/{{ task.t }}", "a/../../other"),
        ("repos/{{ task.t }}", "out"),
        ("repos/p-{{ task.t }}", "/../../other"),
        ("{{ config_dir }}/repos/{{ task.t }}", "../other"),
        ("{% set t = task.t %}{{ t }}", "/etc"),
    ],
)
def test_a_task_chooses_its_template_below_the_named_folder(
    config: Config, tmp_path: Path, template: str, value: str
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "repos/p-").mkdir(parents=True)
    (tmp_path / "repos/out").symlink_to(tmp_path / "other")
    with pytest.raises(LaunchError, match=r"workspace.template: .* leads out of") as caught:
        prepared(config(workspace={"template": template}), {"t": value})
    assert caught.value.final


def test_a_template_of_the_run_file_s_own_may_lie_anywhere(config: Config, tmp_path: Path) -> None:
    (tmp_path / "elsewhere/a").mkdir(parents=True)
    (tmp_path / "elsewhere/a/f").touch()
    at = prepared(config(workspace={"template": f"{tmp_path}/run/../elsewhere/{{{{ task.t }}}}"}), {"t": "a"})
    assert [p.name for p in at.iterdir()] == ["f"]


def test_a_template_that_holds_the_run_folder_is_copied_without_it(config: Config, tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    (tmp_path / "to f").symlink_to(tmp_path / "f")
    made = config(workspace={"template": "."})
    for _ in range(2):
        at = prepared(made, {})
        assert sorted(p.name for p in at.iterdir()) == ["f", "to f"]
        assert (at / "to f").readlink() == Path("f")
    for inside in ("run", "run/attempts"):
        with pytest.raises(LaunchError, match="is in the run's own folder"):
            prepared(config(workspace={"template": inside}), {})


def test_half_a_surrogate_pair_is_named_with_its_key(config: Config) -> None:
    made = config(harness={"command": ["a", "b{{ task.t }}"]})
    with pytest.raises(
        LaunchError, match=r"harness.command\[1\] has half a surrogate pair \(at character 1\)"
    ) as caught:
        local_jobs(made, URL, {}).harness(rollout("r1", task={"t": "\ud83d"}), "key")
    assert caught.value.final


def test_ids_that_are_no_file_names_are_refused(tmp_path: Path) -> None:
    assert attempt_paths(tmp_path, "train-00001-0003-002", 1).root == tmp_path / "attempts/train-00001-0003-002/1"
    for bad in ("", "..", "a/b", "a.b", "a b"):
        with pytest.raises(LaunchError, match="has characters other than"):
            attempt_paths(tmp_path, bad, 1)


def prepared(config: RunConfig, task: dict[str, Any]) -> Path:
    paths = attempt_paths(config.run_dir, "r1", 1)
    workspace.prepare(config.workspace, RunFacts.of(config), rollout("r1", task=task), paths)
    return paths.workspace


def test_workspace_is_a_copy_of_the_template_with_the_tasks_files(config: Config, tmp_path: Path) -> None:
    (tmp_path / "templates/a/sub").mkdir(parents=True)
    (tmp_path / "templates/a/sub/kept.txt").write_text("kept")
    (tmp_path / "templates/a/link").symlink_to("sub/kept.txt")
    (tmp_path / "templates/a/run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "templates/a/run.sh").chmod(0o755)
    made = config(workspace={"template": "templates/{{ task.repo }}", "files": "files"})
    task = {"repo": "a", "files": {"sub/new.py": "x = 1\n", "run.sh": "#!/bin/bash\n", "deep/er/ü.txt": "ü"}}
    for _ in range(2):  # what an interrupted start left is replaced
        made_at = prepared(made, task)
        (made_at / "left").touch()
    (made_at / "left").unlink()
    found = {str(p.relative_to(made_at)): p.read_text() for p in made_at.rglob("*") if p.is_file()}
    assert found == {
        "sub/kept.txt": "kept", "link": "kept", "sub/new.py": "x = 1\n", "run.sh": "#!/bin/bash\n",
        "deep/er/ü.txt": "ü",
    }  # fmt: skip
    assert os.access(made_at / "run.sh", os.X_OK) and (made_at / "link").is_symlink()
    assert made_at.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", ".", "a\0b"])
def test_files_outside_the_workspace_are_refused(config: Config, path: str) -> None:
    with pytest.raises(LaunchError, match="is not a path inside the workspace"):
        prepared(config(workspace={"files": "files"}), {"files": {path: "x"}})


@pytest.mark.parametrize("files", [None, ["a"], {"a": 1}])
def test_files_field_of_the_wrong_kind_is_refused(config: Config, files: object) -> None:
    with pytest.raises(LaunchError, match="field 'files' must map relative paths to texts"):
        prepared(config(workspace={"files": "files"}), {"files": files})


def test_links_out_of_the_template_are_refused(config: Config, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t/out").symlink_to("/etc")
    with pytest.raises(LaunchError, match="leads out of the template"):
        prepared(config(workspace={"template": "t"}), {})


def test_files_are_not_written_through_links(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w/up").symlink_to("..")
    (tmp_path / "w/file").symlink_to("../target")
    for path in ("up/x", "file"):
        with pytest.raises(LaunchError, match="through a link"):
            workspace.write_files(tmp_path / "w", {workspace._relative(path): "x"})


def test_missing_template_is_named(config: Config, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=f"workspace.template: {tmp_path}/none is not a folder"):
        prepared(config(workspace={"template": "none"}), {})


def test_remove_opens_folders_without_write_permission(tmp_path: Path) -> None:
    (tmp_path / "w/deep").mkdir(parents=True)
    (tmp_path / "w/deep/file").touch()
    (tmp_path / "w/deep").chmod(0o500)
    workspace.remove(tmp_path / "w")
    assert not (tmp_path / "w").exists()


def test_areas_for_huge_pages() -> None:
    """Only anonymous, private, writable memory, and of that what is aligned to 2 MiB."""
    maps = """\
00400000-00c00000 rw-p 00000000 fe:00 17      /usr/bin/python
55500000-55d00001 rw-p 00000000 00:00 0       [heap]
70000000-70200000 r--p 00000000 00:00 0
70200000-70400000 rw-p 00000000 00:00 0
70500000-706fffff rw-p 00000000 00:00 0
7ff00000-80500000 rw-p 00000000 00:00 0       [stack]
"""
    assert areas(maps) == [(0x55600000, 0x600000), (0x70200000, 0x200000)]
