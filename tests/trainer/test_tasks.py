from __future__ import annotations

import hashlib
from itertools import chain

import pytest

from leyden.errors import ConfigError
from leyden.trainer.tasks import epoch_order, read_tasks, tasks_for_step


def steps(count, total, groups, seed=3, shuffle=True):
    return [tasks_for_step(count, step, groups, seed=seed, shuffle=shuffle) for step in range(1, total + 1)]


def test_each_epoch_holds_each_task_once():
    flat = list(chain(*steps(10, 5, 4)))
    assert sorted(flat[:10]) == list(range(10))
    assert sorted(flat[10:20]) == list(range(10))
    assert flat[:10] != flat[10:20]


def test_the_order_is_fixed_by_seed_and_epoch():
    assert epoch_order(6, 0, 0) == [4, 2, 0, 5, 1, 3]
    assert epoch_order(6, 0, 1) != epoch_order(6, 0, 0)
    assert epoch_order(6, 1, 0) != epoch_order(6, 0, 0)


def test_resume_repeats_and_skips_nothing():
    """T02: what step 3 and later train does not depend on having run steps 1 and 2."""
    whole = steps(10, 7, 2)
    resumed = [tasks_for_step(10, step, 2, seed=3, shuffle=True) for step in range(4, 8)]
    assert whole[3:] == resumed


def test_without_shuffle_tasks_come_in_file_order():
    assert steps(3, 3, 2, shuffle=False) == [[0, 1], [2, 0], [1, 2]]


def test_more_groups_than_tasks():
    (step,) = steps(2, 1, 5)
    assert sorted(step[:2]) == sorted(step[2:4]) == [0, 1]


def test_read_tasks(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'{"a": 1}\n\n  \n{"b": "\xc3\xa9"}')
    data = read_tasks(path)
    assert data.tasks == ({"a": 1}, {"b": "é"})
    assert len(data) == 2
    assert data.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_integers_of_64_bits_and_digits_in_text_are_exact(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 18446744073709551615, "b": -9223372036854775808, "c": "18446744073709551617"}')
    (task,) = read_tasks(path).tasks
    assert task == {"a": 2**64 - 1, "b": -(2**63), "c": "18446744073709551617"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n{"a": \n', "tasks.jsonl:2: not JSON"),
        (b'{"a": 1}\n\n[1]\n', "tasks.jsonl:3: a task is a JSON object, not list"),
        (b'{"a": NaN}\n', "tasks.jsonl:1: not JSON"),
        (
            b'{"a": 18446744073709551617}\n',
            "tasks.jsonl:1: the integer 18446744073709551617 has more than 64 bits; quote it",
        ),
        (
            b'{"a": [{"b": -9223372036854775809}]}\n',
            "tasks.jsonl:1: the integer -9223372036854775809 has more than 64 bits",
        ),
        (b"\n \n", "holds no task"),
    ],
)
def test_bad_lines_are_named(tmp_path, content, message):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_tasks(path, "data.validation")
    assert caught.value.path == "data.validation"


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.train: cannot read .*none\.jsonl: No such file"):
        read_tasks(tmp_path / "none.jsonl")
