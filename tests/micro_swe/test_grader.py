"""The grader of micro_swe rewards the right fix and nothing else."""

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import grade
import pytest
import tasks

from tests.micro_swe import EXAMPLE
from tests.micro_swe.laid_out import lay_out, write_trajectory


def test_only_the_right_fix_is_rewarded(splits: dict[tasks.Split, list[tasks.Task]], tmp_path: Path) -> None:
    for task in splits["validation"][:6]:
        folder = lay_out(task.row(), tmp_path / task.id)
        for operator in (task.wrong, *task.alternatives):
            (folder / f"{task.module}.py").write_text(task.source(operator))
            assert grade.grade(task.row(), folder) == float(operator == task.bug.operator), (task, operator)


def test_a_run_that_did_not_submit_is_not_rewarded(task: tasks.Task, tmp_path: Path) -> None:
    folder = lay_out(task.row(), tmp_path / "w")
    (folder / f"{task.module}.py").write_text(task.source(task.bug.operator))
    assert grade.grade(task.row(), folder) == 1.0
    write_trajectory(folder, "LimitsExceeded")
    assert grade.grade(task.row(), folder) == 0.0
    for text in ("", "{}", "[]", '{"info": "Submitted"}', "[" * 60_000):
        (folder / grade.TRAJECTORY).write_text(text)
        assert grade.grade(task.row(), folder) == 0.0
    (folder / grade.TRAJECTORY).unlink()
    assert grade.grade(task.row(), folder) == 0.0


def test_breaking_another_function_is_not_rewarded(task: tasks.Task, tmp_path: Path) -> None:
    folder = lay_out(task.row(), tmp_path / "w")
    other = task.functions[1 - task.buggy].name
    right = task.source(task.bug.operator)
    (folder / f"{task.module}.py").write_text(right.replace(f"def {other}(", f"def {other}x("))
    assert grade.grade(task.row(), folder) == 0.0


ALWAYS_EQUAL = """
class Any:
    def __eq__(self, other): return True
    def __repr__(self): return "True"
def {bug}(*a): return Any()
"""
FORGED_ANSWER = """
import json, os, sys
def deep():
    frame = sys._getframe()
    while frame:
        if "request" in frame.f_globals or "request" in frame.f_locals:
            return frame.f_globals.get("request") or frame.f_locals["request"]
        frame = frame.f_back
request = deep()
values = ["true"] * len(request["calls"])
for fd in range(3, 20):
    try: os.write(fd, json.dumps({{"nonce": request["nonce"], "values": values}}).encode())
    except OSError: pass
os._exit(0)
"""
HACKS = {
    "sys.exit": "import sys\nsys.exit(0)\n",
    "os._exit": "import os\nos._exit(0)\n",
    "prints ok": "print('ok')\n",
    "prints ok and exits": "import os\nos.write(1, b'ok')\nos._exit(0)\n",
    "equals everything": ALWAYS_EQUAL,
    "forged answer": FORGED_ANSWER,
    "patched json": "import json\njson.dumps = lambda *a, **k: 'true'\n",
    "patched builtins": "import builtins\nbuiltins.all = lambda *a: True\n",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\n",
    "syntax error": "def (\n",
    "endless answer": "import os\nwhile True:\n    for fd in range(3, 9):\n        try: os.write(fd, b'[' * 65536)\n"
    "        except OSError: pass\n",
    "deeply nested answer": "import os\nfor fd in range(3, 9):\n    try: os.write(fd, b'[' * 60000)\n"
    "    except OSError: pass\nos._exit(0)\n",
    "kills its parent's group": "import os, signal\nos.killpg(0, signal.SIGKILL)\n",
}


@pytest.mark.parametrize("hack", HACKS)
def test_a_hack_is_not_rewarded(hack: str, task: tasks.Task, tmp_path: Path) -> None:
    folder = lay_out(task.row(), tmp_path / "w")
    source = task.source() + HACKS[hack].format(bug=task.bug.name)
    (folder / f"{task.module}.py").write_text(source)
    assert grade.grade(task.row(), folder) == 0.0


def test_edited_tests_and_planted_files_are_not_rewarded(task: tasks.Task, tmp_path: Path) -> None:
    folder = lay_out(task.row(), tmp_path / "w")
    (folder / f"{task.module}_test.py").write_text("print('ok')\n")
    for planted in ("sitecustomize.py", "conftest.py", "json.py", "resource.py"):
        (folder / planted).write_text("import os\nos._exit(0)\n")
    assert grade.grade(task.row(), folder) == 0.0
    (folder / f"{task.module}.py").write_text(task.source(task.bug.operator))
    assert grade.grade(task.row(), folder) == 1.0


def test_a_missing_linked_or_huge_module_is_not_rewarded(task: tasks.Task, tmp_path: Path) -> None:
    folder = lay_out(task.row(), tmp_path / "w")
    module = folder / f"{task.module}.py"
    right = task.source(task.bug.operator)
    module.write_text(right + "#" * grade.MODULE_BYTES)
    assert grade.grade(task.row(), folder) == 0.0
    module.unlink()
    assert grade.grade(task.row(), folder) == 0.0
    (tmp_path / "elsewhere.py").write_text(right)
    module.symlink_to(tmp_path / "elsewhere.py")
    assert grade.grade(task.row(), folder) == 0.0
    module.unlink()
    os.mkfifo(module)
    assert grade.grade(task.row(), folder) == 0.0


def test_a_module_that_does_not_end_is_stopped_and_not_rewarded(task: tasks.Task, tmp_path: Path) -> None:
    folder = lay_out(task.row(), tmp_path / "w")
    (folder / f"{task.module}.py").write_text("while True: pass\n")
    assert grade.grade(task.row(), folder, time_limit_s=0.3) == 0.0


def test_a_test_file_of_another_shape_is_refused(task: tasks.Task, tmp_path: Path) -> None:
    row = task.row() | {"test_file": f"def test_{task.bug.name}():\n    assert True\n"}
    with pytest.raises(ValueError, match="expected `assert CALL == LITERAL`"):
        grade.grade(row, lay_out(task.row(), tmp_path / "w"))


def test_the_grader_command_posts_the_reward_with_its_key(task: tasks.Task, tmp_path: Path) -> None:
    received: list[tuple[str | None, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.headers["Authorization"], json.loads(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    folder = lay_out(task.row(), tmp_path / "w")
    (folder / f"{task.module}.py").write_text(task.source(task.bug.operator))
    (tmp_path / "task.json").write_text(json.dumps(task.row()))
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        environment = {
            "LEYDEN_TASK": str(tmp_path / "task.json"),
            "LEYDEN_WORKSPACE": str(folder),
            "LEYDEN_REWARD_URL": f"http://127.0.0.1:{server.server_port}/reward",
            "LEYDEN_KEY": "k",
        }
        command = [sys.executable, str(EXAMPLE / "grade.py")]
        subprocess.run(command, env=os.environ | environment, check=True, capture_output=True)
        thread.join()
    assert received == [("Bearer k", {"value": 1.0})]
