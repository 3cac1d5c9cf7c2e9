import numpy as np

from leyden.trainer.embedded.slots import Placement, SlotTable, prefill_batches


def ids(*values):
    return np.asarray(values, np.int32)


def placed(table, prompt, release=True):
    placement = table.place(prompt)
    table.computed(placement.slot, len(prompt))
    if release:
        table.release(placement.slot)
    return placement


def test_next_turn_of_a_conversation_finds_its_slot():
    table = SlotTable(3, 100)
    assert placed(table, ids(1, 2, 3, 4)) == Placement(0, 0, None)
    assert placed(table, ids(9, 8, 7)) == Placement(1, 0, None)
    assert table.place(ids(1, 2, 3, 4, 5)) == Placement(0, 4, None)
    assert table.place(ids(9, 8, 7, 6)) == Placement(1, 3, None)
    assert table.free == 1


def test_the_last_token_is_always_computed():
    table = SlotTable(1, 100)
    placed(table, ids(1, 2, 3))
    assert table.place(ids(1, 2, 3)) == Placement(0, 2, None)


def test_a_shared_beginning_does_not_take_a_conversation_away():
    table = SlotTable(2, 100)
    placed(table, ids(1, 2, 3, 4))
    assert table.place(ids(1, 9)) == Placement(1, 0, None)


def test_a_long_shared_beginning_is_copied():
    table = SlotTable(2, 100)
    placed(table, ids(*range(50)))
    assert placed(table, ids(*range(20), 99, 98)) == Placement(1, 20, 0)
    # also from a slot in use
    table = SlotTable(2, 100)
    placed(table, ids(*range(50)), release=False)
    assert table.place(ids(*range(50))) == Placement(1, 49, 0)


def test_least_recently_used_slot_is_given_away():
    table = SlotTable(2, 10)
    placed(table, ids(1, 1, 1))
    placed(table, ids(2, 2, 2))
    assert placed(table, ids(3, 3, 3)).slot == 0
    assert placed(table, ids(4, 4, 4)).slot == 1


def test_nothing_is_reused_after_forget():
    table = SlotTable(1, 10)
    placed(table, ids(1, 2, 3))
    table.forget()
    assert table.place(ids(1, 2, 3, 4)).reused == 0


def test_equal_prompts_wait_for_the_first():
    table = SlotTable(4, 200)
    prompt = ids(*range(100))
    assert not table.should_wait(prompt)
    slot = table.place(prompt).slot
    assert table.should_wait(prompt)
    assert not table.should_wait(ids(*range(30), *range(150, 100, -1)))
    table.computed(slot, 100)
    assert not table.should_wait(prompt)
    assert table.place(prompt) == Placement(1, 99, 0)


def test_prefill_batches():
    assert prefill_batches([30, 500, 20, 900, 8], max_tokens=1000) == [[4, 2, 0], [1], [3]]
    assert prefill_batches([100, 100, 100], max_tokens=200) == [[0, 1], [2]]
    assert prefill_batches([], max_tokens=10) == []
