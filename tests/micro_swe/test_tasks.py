"""The tasks of micro_swe."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import tasks

from tests.micro_swe.conftest import COUNTS
from tests.micro_swe.laid_out import lay_out


def test_the_same_seed_writes_the_same_bytes_and_another_seed_does_not(tmp_path: Path) -> None:
    counts: dict[tasks.Split, int] = {"train": 20, "validation": 8, "test": 8}
    first = tasks.write_data(tmp_path / "a", counts, seed=3)
    second = tasks.write_data(tmp_path / "b", counts, seed=3)
    assert first == second == json.loads((tmp_path / "a" / "data.json").read_text())
    for split in tasks.SPLITS:
        text = (tmp_path / "a" / f"{split}.jsonl").read_bytes()
        assert text == (tmp_path / "b" / f"{split}.jsonl").read_bytes()
        assert hashlib.sha256(text).hexdigest() == first["files"][f"{split}.jsonl"]
        assert len(text.splitlines()) == counts[split]
    assert tasks.write_data(tmp_path / "c", counts, seed=4)["sha256"] != first["sha256"]


def test_the_data_of_seed_0_is_the_recorded_one() -> None:
    text = tasks.to_jsonl(tasks.make_splits({"train": 0, "validation": 128, "test": 0}, seed=0)["validation"])
    assert tasks.sha256(text) == "fff8bd261532bc86aa4fff90e5fd949f81016076e860cdc8d0aa792f8c7e0826"


def test_held_out_templates_and_names_do_not_occur_in_training(
    splits: dict[tasks.Split, list[tasks.Task]],
) -> None:
    train_templates = {(f.family, f.operator) for task in splits["train"] for f in task.functions}
    train_names = {f.name for task in splits["train"] for f in task.functions}
    assert len(train_templates) == 38
    for split in ("validation", "test"):
        assert {task.template for task in splits[split]} == tasks.HELD_OUT_TEMPLATES
        assert not {task.template for task in splits[split]} & train_templates
        assert not {f.name for task in splits[split] for f in task.functions} & train_names


def test_no_two_tasks_are_equal(splits: dict[tasks.Split, list[tasks.Task]]) -> None:
    sources = [task.source() for split in tasks.SPLITS for task in splits[split]]
    assert len(set(sources)) == len(sources) == sum(COUNTS.values())


def test_a_row_holds_the_contract(splits: dict[tasks.Split, list[tasks.Task]]) -> None:
    row = splits["train"][0].row()
    module = row["module"]
    assert row["id"] == "train-0000"
    assert row["prompt"] == f"fix {module}.py"
    assert set(row["files"]) == {f"{module}.py", f"{module}_test.py"}
    assert row["files"][f"{module}_test.py"] == row["test_file"]
    assert len(row["fail_to_pass"]) == len(row["pass_to_pass"]) == 1


def test_the_test_file_tells_the_bug_from_the_fix(splits: dict[tasks.Split, list[tasks.Task]], tmp_path: Path) -> None:
    for task in splits["validation"][:2]:
        folder = lay_out(task.row(), tmp_path / task.id)
        run = [sys.executable, "-B", f"{task.module}_test.py"]
        broken = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=False)
        assert (broken.returncode, broken.stdout, broken.stderr) == (1, "", f"FAILED {task.bug.name}\n")
        (folder / f"{task.module}.py").write_text(task.source(task.bug.operator))
        fixed = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=False)
        assert (fixed.returncode, fixed.stdout, fixed.stderr) == (0, "ok\n", "")


# Grader


# Emulation


# Base model
