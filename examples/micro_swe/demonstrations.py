"""Demonstrations for the warm start: a scripted agent that knows the fix and is, on purpose, not good at
applying it.

It looks at the file and the failing test, edits, submits. With the probabilities of its `Habits` it takes
another operator, edits the other function, or submits without an edit: behaviour that reinforcement
learning can correct. It also slips: it writes a malformed reply or a command that fails, sees what mini or
the shell says, and does the right thing next. Slips are context and are not learned from; they are there so
that a real run shows nothing new.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from harness import SUBMIT, Episode, block, look, replace
from tasks import Task


@dataclass(frozen=True)
class Habits:
    """Probabilities: right operator, right function, submitting without an edit, a slip on the way."""

    right_operator: float
    right_function: float
    lazy: float
    slip: float


@dataclass(frozen=True)
class Slip:
    """A reply that fails. `result`: exit status and output of its command; None: mini finds no command."""

    reply: str
    result: tuple[int, str] | None


def edit(task: Task, rng: random.Random, habits: Habits) -> str:
    others = [operator for operator in task.alternatives if operator != task.bug.operator]
    operator = task.bug.operator if rng.random() < habits.right_operator else rng.choice(others)
    function = task.bug if rng.random() < habits.right_function else task.functions[1 - task.buggy]
    return replace(function.name, task.wrong, operator, task.module)


def plan(task: Task, rng: random.Random, habits: Habits) -> list[str]:
    """The commands of one demonstration."""
    edits = [] if rng.random() < habits.lazy else [edit(task, rng, habits)]
    return [look(task.module), *edits, SUBMIT]


def malformed(command: str, task: Task, rng: random.Random) -> Slip:
    """A reply with text around its block, without one, or cut off."""
    text = block(command)
    replies = (
        command,
        f"fix {task.module}.py\n{text}",
        f"{text}\n{text}x",
        text[: rng.randrange(4, len(text) - 3)],
    )
    return Slip(rng.choice(replies), None)


def misspelt(word: str, rng: random.Random) -> str:
    """The word without one of its letters, not the first."""
    at = rng.randrange(1, len(word))
    return word[:at] + word[at + 1 :]


def unknown_command(command: str, task: Task, rng: random.Random) -> Slip:
    """What dash and bash say as `/bin/sh`."""
    program, _, rest = command.partition(" ")
    wrong = misspelt(program, rng) + "x"
    said = rng.choice((f"1: {wrong}: not found", f"line 1: {wrong}: command not found"))
    tail = f" {rest.partition(';')[0]}"
    return Slip(block(wrong + tail), (127, f"/bin/sh: {said}\n"))


def unterminated(command: str, task: Task, rng: random.Random) -> Slip:
    expression = f"/ {task.bug.name}/s,{task.wrong} , "
    said = f"sed: -e expression #1, char {len(expression)}: unterminated `s' command\n"
    return Slip(block(f"sed -i '{expression}' {task.module}.py"), (1, said))


def missing_file(command: str, task: Task, rng: random.Random) -> Slip:
    name = misspelt(task.module, rng) + ".py"
    program, said, status = rng.choice(
        (
            ("cat", f"cat: {name}: No such file or directory\n", 1),
            ("sed -i 's, + , - ,'", f"sed: can't read {name}: No such file or directory\n", 2),
        )
    )
    return Slip(block(f"{program} {name}"), (status, said))


def python_error(command: str, task: Task, rng: random.Random) -> Slip:
    """Standing in a folder whose name the demonstration cannot know."""
    name = f"{task.module}_{misspelt('test', rng)}.py"
    folder = rng.choice(("/tmp", "/home", "/runs")) + f"/{rng.randrange(16**6):x}"
    said = f"python3: can't open file '{folder}/{name}': [Errno 2] No such file or directory\n"
    return Slip(block(f"python3 {name}"), (2, said))


MAKERS: tuple[Callable[[str, Task, random.Random], Slip], ...] = (
    malformed,
    malformed,
    unknown_command,
    unterminated,
    missing_file,
    python_error,
)


@dataclass(frozen=True)
class Reply:
    text: str
    trained: bool


def demonstrate(task: Task, rng: random.Random, habits: Habits) -> tuple[Episode, list[Reply]]:
    """Run the scripted agent in the emulated harness; return the episode and the replies that mini kept."""
    episode = Episode(task)
    kept: list[Reply] = []
    slipped = False
    for command in plan(task, rng, habits):
        if not slipped and rng.random() < habits.slip:
            slipped = True
            slip = rng.choice(MAKERS)(command, task, rng)
            if episode.answer(slip.reply, slip.result):
                kept.append(Reply(slip.reply, trained=False))
        episode.answer(block(command))
        kept.append(Reply(block(command), trained=True))
    return episode, kept
