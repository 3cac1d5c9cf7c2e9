"""Small bug-fixing tasks in the manner of SWE-smith: working code, one injected bug, tests that say which
is which.

A task is a repository of two files. `web.py` holds two one-line functions, each with a comment that says
what it computes; in one of them an operator was replaced. `web_test.py` holds a test per function and runs
as `python3 web_test.py`, which prints the first function whose test fails, or `ok`.

    def pea_cub(a, b): return a + b  # a minus b
    def oak_fly(p): return max(p)  # largest of p

Every task is verified when it is made: the FAIL_TO_PASS test fails before and passes after the right fix,
the PASS_TO_PASS test passes in both, and with every other operator of the family the FAIL_TO_PASS test
still fails.

Held out from training are 14 templates, that is pairs of a family and its right operator, and a fifth of
all function names. Buggy functions of `validation` and `test` have a held-out template, all their functions
have held-out names; neither occurs anywhere in `train`. No two tasks are equal, within a split or across
splits.

    python tasks.py --out data --train 2000 --validation 128 --test 256 --seed 0
"""

import argparse
import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

WORDS = tuple(
    """
    ant bat bee box bud cat cod cow cub dog eel elk fig fir fly fox gem hen hog ink ivy jay key kit lid log
    map mud nut oak owl pan pea pig pin pod pup ram rat ray red rye sea sky sod sun tar tea tin toy urn
    van vat wax web yak yam zoo
    """.split()  # noqa: SIM905
)
ARGUMENTS = tuple("abcdpqxyz")

ARITHMETIC = {"+": "plus", "-": "minus", "*": "times", "//": "over", "%": "modulo"}
COMPARISON = {">": "above", "<": "below", ">=": "atleast", "<=": "atmost", "==": "equal"}
REDUCTION = {"max": "largest", "min": "smallest", "sum": "total", "len": "size"}

UNUSABLE_AS_BUG = "*"
"""In a basic regular expression ` * ` matches spaces, so that `sed` could not name this operator plainly."""


@dataclass(frozen=True)
class Family:
    """A shape of function: `{a}`, `{b}` are arguments, `{op}` the operator, `{word}` its name."""

    comment: str
    expression: str
    words: dict[str, str]
    calls: tuple[tuple[Any, ...], ...]

    @property
    def parameters(self) -> int:
        return len(self.calls[0])


NUMBERS = ((7, 3), (9, 4), (4, 4), (2, 5))
LIST_AND_NUMBER = (([5, 2, 8, 4], 4), ([3, 9, 6], 6))
LIST = (([4, 1, 9, 2],), ([7, 3, 5],))

FAMILIES = {
    "plain": Family("{a} {word} {b}", "{a} {op} {b}", ARITHMETIC, NUMBERS),
    "each": Family("each of {a} {word} {b}", "[v {op} {b} for v in {a}]", ARITHMETIC, LIST_AND_NUMBER),
    "double": Family("double {a} {word} {b}", "({a} {op} {b}) * 2", ARITHMETIC, NUMBERS),
    "negative": Family("negative {a} {word} {b}", "-({a} {op} {b})", ARITHMETIC, NUMBERS),
    "compare": Family("is {a} {word} {b}", "{a} {op} {b}", COMPARISON, NUMBERS),
    "filter": Family("items of {a} {word} {b}", "[v for v in {a} if v {op} {b}]", COMPARISON, LIST_AND_NUMBER),
    "count": Family("count of {a} {word} {b}", "len([v for v in {a} if v {op} {b}])", COMPARISON, LIST_AND_NUMBER),
    "flags": Family("flags of {a} {word} {b}", "[v {op} {b} for v in {a}]", COMPARISON, LIST_AND_NUMBER),
    "reduce": Family("{word} of {a}", "{op}({a})", REDUCTION, LIST),
    "extend": Family("{word} of {a} and {b}", "{op}({a} + [{b}])", REDUCTION, LIST_AND_NUMBER),
    "tail": Family("{word} of tail {a}", "{op}({a}[1:])", REDUCTION, LIST),
}

HELD_OUT_TEMPLATES = frozenset(
    {
        ("plain", "%"),
        ("each", "+"),
        ("double", "-"),
        ("negative", "//"),
        ("negative", "*"),
        ("compare", "<"),
        ("filter", ">="),
        ("count", ">"),
        ("flags", "<="),
        ("flags", "=="),
        ("reduce", "min"),
        ("extend", "sum"),
        ("tail", "max"),
        ("tail", "len"),
    }
)


def is_held_out_name(name: str) -> bool:
    """A fifth of all function names, chosen by hash, is reserved for validation and test."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 5 == 0


@dataclass(frozen=True)
class Function:
    family: str
    operator: str
    name: str
    a: str
    b: str

    def line(self, operator: str) -> str:
        """The function as one line of source with `operator` in place of its right one."""
        family = FAMILIES[self.family]
        expression = family.expression.format(a=self.a, b=self.b, op=operator)
        comment = family.comment.format(a=self.a, b=self.b, word=family.words[self.operator])
        parameters = ", ".join((self.a, self.b)[: family.parameters])
        return f"def {self.name}({parameters}): return {expression}  # {comment}"


@dataclass(frozen=True)
class Task:
    """One task. `wrong` is the operator that stands in `functions[buggy]` instead of its right one."""

    id: str
    module: str
    functions: tuple[Function, ...]
    buggy: int
    wrong: str

    @property
    def bug(self) -> Function:
        return self.functions[self.buggy]

    @property
    def template(self) -> tuple[str, str]:
        return self.bug.family, self.bug.operator

    @property
    def prompt(self) -> str:
        return f"fix {self.module}.py"

    @property
    def alternatives(self) -> tuple[str, ...]:
        """The operators that could replace the wrong one, the right one among them."""
        return tuple(op for op in FAMILIES[self.bug.family].words if op != self.wrong)

    def source(self, operator: str | None = None) -> str:
        """The module with `operator` in the buggy function; by default as the agent finds it."""
        chosen = self.wrong if operator is None else operator
        lines = (f.line(chosen if i == self.buggy else f.operator) for i, f in enumerate(self.functions))
        return "".join(f"{line}\n" for line in lines)

    def test_source(self) -> str:
        return test_file(self.module, self.functions, self.source(self.bug.operator))

    def row(self) -> dict[str, Any]:
        """The task as a row of the data set. Its `template` tells the fix: the agent is not shown it."""
        test = self.test_source()
        others = [f for i, f in enumerate(self.functions) if i != self.buggy]
        return {
            "id": self.id,
            "prompt": self.prompt,
            "files": {f"{self.module}.py": self.source(), f"{self.module}_test.py": test},
            "module": self.module,
            "fail_to_pass": [f"test_{self.bug.name}"],
            "pass_to_pass": [f"test_{f.name}" for f in others],
            "test_file": test,
            "template": "/".join(self.template),
        }


def call_all(source: str, functions: tuple[Function, ...]) -> dict[str, list[Any]]:
    """Name of each function -> its results for its family's calls. Runs `source` in this process."""
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    return {f.name: [namespace[f.name](*call) for call in FAMILIES[f.family].calls] for f in functions}


def test_file(module: str, functions: tuple[Function, ...], right_source: str) -> str:
    """A test per function that asserts what the right source returns, and a runner."""
    expected = call_all(right_source, functions)
    parts = [f"import {module}\n"]
    for function in functions:
        calls = zip(FAMILIES[function.family].calls, expected[function.name], strict=True)
        parts.append(f"\n\ndef test_{function.name}():\n")
        for call, result in calls:
            arguments = ", ".join(map(repr, call))
            parts.append(f"    assert {module}.{function.name}({arguments}) == {result!r}\n")
    parts.append(
        '\n\nif __name__ == "__main__":\n'
        '    for name, test in [item for item in globals().items() if item[0].startswith("test_")]:\n'
        "        try:\n"
        "            test()\n"
        "        except Exception:\n"
        '            raise SystemExit("FAILED " + name[5:])\n'
        '    print("ok")\n'
    )
    return "".join(parts)


def is_sound(task: Task) -> bool:
    """Whether the right fix, and no other, makes the buggy function's test pass and breaks no other test."""
    right = call_all(task.source(task.bug.operator), task.functions)
    for operator in (task.wrong, *task.alternatives):
        try:
            results = call_all(task.source(operator), task.functions)
        except Exception:
            return False
        same = {f.name: results[f.name] == right[f.name] for f in task.functions}
        expected = {f.name: f is not task.bug or operator == task.bug.operator for f in task.functions}
        if same != expected:
            return False
    return True


def draw_name(rng: random.Random, held_out: bool) -> str:
    while True:
        name = f"{rng.choice(WORDS)}_{rng.choice(WORDS)}"
        if is_held_out_name(name) == held_out:
            return name


def draw_function(rng: random.Random, held_out: bool, buggy: bool) -> Function:
    """In `train` no function has a held-out template; elsewhere the buggy one has, the rest are free."""
    while True:
        family = rng.choice(list(FAMILIES))
        operator = rng.choice(list(FAMILIES[family].words))
        template_held_out = (family, operator) in HELD_OUT_TEMPLATES
        if template_held_out == held_out or (held_out and not buggy):
            a, b = rng.sample(ARGUMENTS, 2)
            return Function(family, operator, draw_name(rng, held_out), a, b)


def draw_task(rng: random.Random, split: Split, task_id: str) -> Task:
    """A verified task with two functions."""
    held_out = split != "train"
    while True:
        buggy = rng.randrange(2)
        functions = tuple(draw_function(rng, held_out, i == buggy) for i in range(2))
        bug = functions[buggy]
        excluded = (bug.operator, UNUSABLE_AS_BUG)
        wrong = rng.choice([op for op in FAMILIES[bug.family].words if op not in excluded])
        task = Task(task_id, rng.choice(WORDS), functions, buggy, wrong)
        if functions[0].name != functions[1].name and is_sound(task):
            return task


def draw_tasks(split: Split, seed: int) -> Iterator[Task]:
    """An endless stream of different tasks, the same for the same seed."""
    rng = random.Random(f"micro_swe/{split}/{seed}")
    seen: set[str] = set()
    number = 0
    while True:
        task = draw_task(rng, split, f"{split}-{number:04d}")
        if task.source() not in seen:
            seen.add(task.source())
            number += 1
            yield task


def make_splits(counts: dict[Split, int], seed: int) -> dict[Split, list[Task]]:
    """`counts[split]` tasks of each split. A task of an earlier split does not come again in a later one."""
    taken: set[str] = set()
    splits: dict[Split, list[Task]] = {}
    for split in SPLITS:
        tasks: list[Task] = []
        stream = draw_tasks(split, seed)
        while len(tasks) < counts[split]:
            task = next(stream)
            if task.source() not in taken:
                taken.add(task.source())
                tasks.append(task)
        splits[split] = tasks
    return splits


def to_jsonl(tasks: list[Task]) -> str:
    return "".join(json.dumps(task.row()) + "\n" for task in tasks)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_data(out: Path, counts: dict[Split, int], seed: int) -> dict[str, Any]:
    """Write `SPLIT.jsonl` for each split and `data.json`; return what `data.json` holds.

    `sha256` there is the hash of the lines `HASH  FILE` of the three files in the order train, validation,
    test.
    """
    out.mkdir(parents=True, exist_ok=True)
    files = {f"{split}.jsonl": to_jsonl(tasks) for split, tasks in make_splits(counts, seed).items()}
    for name, text in files.items():
        (out / name).write_text(text)
    hashes = {name: sha256(text) for name, text in files.items()}
    summary = {
        "seed": seed,
        "counts": dict(counts),
        "files": hashes,
        "sha256": sha256("".join(f"{digest}  {name}\n" for name, digest in hashes.items())),
    }
    (out / "data.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the tasks of micro_swe as JSON lines.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--train", type=int, default=2000)
    parser.add_argument("--validation", type=int, default=128)
    parser.add_argument("--test", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    counts: dict[Split, int] = {split: getattr(arguments, split) for split in SPLITS}
    print(json.dumps(write_data(arguments.out, counts, arguments.seed), indent=2))


if __name__ == "__main__":
    main()
