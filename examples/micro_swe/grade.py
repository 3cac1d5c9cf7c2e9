"""Grader of micro_swe: 1.0 if the module that the agent left passes all tests that its task names, else 0.0.

The edited module runs in a process of its own, in a fresh folder that holds nothing else, with a time limit.
That process is given the *calls* of the pristine test file and answers with what they returned. What they
should have returned stays here: the verdict is a comparison of plain values in this process, so that a module
which prints, exits, edits its tests, returns an object that equals everything, or writes an answer of its own
has nothing to forge. A module that hard-codes the results which the visible tests name is not told apart from
a fix; only hidden tests could do that.

A run has to end by submitting, as it has to in SWE-bench, where a run that does not has no patch. mini says so in
`trajectory.json` in the working folder, which it writes after each step and a last time when it ends. Without this
nothing that an agent does after its edit would count: it learns to ramble until a limit stops it.

    LEYDEN_TASK        path of the task's row as a JSON file
    LEYDEN_WORKSPACE   folder that the agent worked in
    LEYDEN_REWARD_URL  where to POST {"value": REWARD}
    LEYDEN_KEY         bearer key for that
"""

import ast
import contextlib
import http.client
import json
import os
import secrets
import select
import signal
import stat
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

MODULE_BYTES = 65_536
TRAJECTORY = "trajectory.json"
TRAJECTORY_BYTES = 4_194_304
ANSWER_BYTES = 1_048_576
TIME_LIMIT_S = 5.0
POST_ATTEMPTS = 5
POST_TIMEOUT_S = 10.0

RUNNER = """
import json, os, resource, sys
request = json.loads(sys.stdin.buffer.read())
answer = os.dup(1)
silent = os.open(os.devnull, os.O_RDWR)
for descriptor in (0, 1, 2):
    os.dup2(silent, descriptor)
resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
sys.path.insert(0, os.getcwd())

def encoded(call):
    try:
        return json.dumps(eval(call, {request["module"]: module}))
    except Exception:
        return None

module = __import__(request["module"])
values = [encoded(call) for call in request["calls"]]
os.write(answer, json.dumps({"nonce": request["nonce"], "values": values}).encode())
os._exit(0)
"""
"""What runs the edited module. stdin: the request; stdout: one JSON object, after all calls."""


def read_regular(path: Path, limit_bytes: int) -> bytes | None:
    """Content of a regular file of at most so many bytes; None if there is none. Follows no link."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        return file.read() if stat.S_ISREG(status.st_mode) and status.st_size <= limit_bytes else None


def submitted(workdir: Path) -> bool:
    """Whether mini's trajectory in the folder says that the run ended by submitting."""
    content = read_regular(workdir / TRAJECTORY, TRAJECTORY_BYTES)
    try:
        return content is not None and json.loads(content)["info"]["exit_status"] == "Submitted"
    except (ValueError, LookupError, TypeError, RecursionError):
        return False


def assertions(test_source: str, names: list[str]) -> list[tuple[str, Any]]:
    """(call, expected value) of each assertion of the named tests.

    A test is a function of lines `assert CALL == LITERAL`; ValueError if one is missing or reads otherwise.
    """
    functions = {node.name: node for node in ast.parse(test_source).body if isinstance(node, ast.FunctionDef)}
    pairs: list[tuple[str, Any]] = []
    for name in names:
        if name not in functions:
            raise ValueError(f"the task names test {name!r}, which its test file lacks")
        for node in functions[name].body:
            match getattr(node, "test", None):
                case ast.Compare(left=ast.Call() as call, ops=[ast.Eq()], comparators=[value]):
                    pairs.append((ast.unparse(call), ast.literal_eval(value)))
                case _:
                    raise ValueError(f"{name}, line {node.lineno}: expected `assert CALL == LITERAL`")
    return pairs


def run_calls(module: str, source: bytes, calls: list[str], time_limit_s: float) -> list[str | None] | None:
    """What each call returned, as JSON, None if it raised; None in all if the process did not finish."""
    nonce = secrets.token_hex(16)
    request = json.dumps({"nonce": nonce, "module": module, "calls": calls}).encode()
    with tempfile.TemporaryDirectory(prefix="grade-") as folder:
        Path(folder, f"{module}.py").write_bytes(source)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", RUNNER],
            cwd=folder,
            env={"PATH": os.defpath, "PYTHONHASHSEED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            output = exchange(process, request, time.monotonic() + time_limit_s)
        finally:
            kill_session(process)
    return None if output is None else read_answer(output, nonce, len(calls))


def exchange(process: subprocess.Popen[bytes], request: bytes, deadline_s: float) -> bytes | None:
    """Give the process its request and read to the end; None if it says too much or is late (monotonic clock)."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(request)
    output = b""
    while len(output) <= ANSWER_BYTES:
        wait_s = max(0.0, deadline_s - time.monotonic())
        if not select.select([process.stdout], [], [], wait_s)[0]:
            return None
        chunk = os.read(process.stdout.fileno(), 65_536)
        if not chunk:
            return output
        output += chunk
    return None


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and what it left in its session, and reap it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def read_answer(output: bytes, nonce: str, count: int) -> list[str | None] | None:
    """The `count` values of a complete answer that bears the nonce, else None."""
    try:
        answer = json.loads(output)
    except (ValueError, RecursionError):
        return None
    if not isinstance(answer, dict) or answer.get("nonce") != nonce:
        return None
    values = answer.get("values")
    if not isinstance(values, list) or len(values) != count:
        return None
    return values if all(value is None or isinstance(value, str) for value in values) else None


def equals(value: str | None, expected: Any) -> bool:
    """Whether a value that came as JSON equals the expected one."""
    try:
        return value is not None and bool(json.loads(value) == expected)
    except (ValueError, RecursionError):
        return False


def passes(task: dict[str, Any], workdir: Path, time_limit_s: float = TIME_LIMIT_S) -> bool:
    """Whether the module in the folder passes the task's tests. Takes one Python start-up."""
    pairs = assertions(task["test_file"], [*task["fail_to_pass"], *task["pass_to_pass"]])
    source = read_regular(workdir / f"{task['module']}.py", MODULE_BYTES)
    if source is None:
        return False
    values = run_calls(task["module"], source, [call for call, _ in pairs], time_limit_s)
    if values is None:
        return False
    return all(equals(value, expected) for value, (_, expected) in zip(values, pairs, strict=True))


def grade(task: dict[str, Any], workdir: Path, time_limit_s: float = TIME_LIMIT_S) -> float:
    """Reward of what mini left in `workdir`, 1.0 or 0.0."""
    return float(submitted(workdir) and passes(task, workdir, time_limit_s))


def post_reward(url: str, key: str, value: float, wait_s: float = 0.2) -> None:
    """POST the reward. A connection that fails is tried again; an HTTP error status is raised."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps({"value": value}).encode(), headers, method="POST")
    for attempt in range(POST_ATTEMPTS):
        try:
            with urllib.request.urlopen(request, timeout=POST_TIMEOUT_S):
                return
        except urllib.error.HTTPError:
            raise
        except (OSError, http.client.HTTPException):
            if attempt == POST_ATTEMPTS - 1:
                raise
            time.sleep(wait_s * 2**attempt)


def main() -> None:
    task = json.loads(Path(os.environ["LEYDEN_TASK"]).read_text())
    workspace = Path(os.environ["LEYDEN_WORKSPACE"])
    if not workspace.is_dir():
        raise SystemExit(f"LEYDEN_WORKSPACE: no folder {workspace}")
    reward = grade(task, workspace)
    post_reward(os.environ["LEYDEN_REWARD_URL"], os.environ["LEYDEN_KEY"], reward)
    print(f"reward {reward}")


if __name__ == "__main__":
    main()
