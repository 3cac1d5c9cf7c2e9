import json
import random
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from leyden.errors import TrainingError
from leyden.trainer.folder import checkpoints

from .conftest import tiny_model
from .test_policy import TEMPERATURE, batch_of, make, weights  # noqa: F401


def step(policy, n):
    """An update that depends on every random generator a training step may use."""
    rewards = (random.random(), np.random.rand(), torch.rand(()).item(), float(n))
    return policy.update(batch_of(tiny_model(), rewards=rewards), TEMPERATURE)


def seed_all():
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def test_two_and_two_steps_are_four(make, tmp_path):  # noqa: F811
    """Bit-identical continuation, mini-batch order included."""
    seed_all()
    straight = make(mini_batches=2)
    expected = [step(straight, n) for n in range(4)]

    seed_all()
    first = make(mini_batches=2)
    for n in range(2):
        step(first, n)
    path = first.save(tmp_path, "step-000002", {"step": 2, "lineage": "x", "cursor": [1, 2]}, keep=2)

    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    second = make(mini_batches=2)
    assert second.load(path) == {"step": 2, "lineage": "x", "cursor": [1, 2]}
    assert second.optimizer_steps == 4
    again = [step(second, n) for n in range(2, 4)]
    assert torch.equal(weights(second), weights(straight))
    for a, b in zip(again, expected[2:], strict=True):
        assert (a.loss, a.grad_norm, a.entropy) == (b.loss, b.grad_norm, b.entropy)


def test_checkpoint_is_a_model_folder(make, tmp_path):  # noqa: F811
    policy = make()
    policy.update(batch_of(tiny_model()), TEMPERATURE)
    path = policy.save(tmp_path, "step-000001", {}, keep=1)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), weights(policy))
    assert AutoTokenizer.from_pretrained(path).encode("hi") == policy.tokenizer.encode("hi")
    assert (path / "model.safetensors").is_file()
    assert json.loads((path / "state.json").read_text())["policy"] == {"optimizer_steps": 1}


def saved_state(path):
    return json.loads((path / "state.json").read_text())["state"]


def test_the_newest_are_kept_and_what_is_incomplete_is_ignored(make, tmp_path):  # noqa: F811
    policy = make()
    root = tmp_path / "checkpoints"
    assert checkpoints(root) == []
    for n in (1, 2, 10):
        policy.save(root, f"step-{n:06d}", {"step": n}, keep=2)
    assert sorted(p.name for p in root.iterdir()) == ["step-000002", "step-000010"]
    policy.save(root, "step-000012", {"step": 12}, keep=1, also=2)
    assert sorted(p.name for p in root.iterdir()) == ["step-000002", "step-000012"]
    policy.save(root, "step-000010", {"step": 10}, keep=2)
    assert sorted(p.name for p in root.iterdir()) == ["step-000010", "step-000012"]
    shutil.rmtree(root / "step-000012")
    (root / ".tmp-step-000012").mkdir()
    (root / ".tmp-step-000012" / "state.json").write_text("{}")
    (root / "notes").mkdir()
    assert checkpoints(root) == [root / "step-000010"]
    assert saved_state(root / "step-000010") == {"step": 10}
    policy.save(root, "step-000010", {"step": 10, "again": True}, keep=2)
    assert saved_state(root / "step-000010") == {"step": 10, "again": True}
    assert not list(root.glob(".tmp-*"))


def test_a_crash_while_writing_leaves_the_old_ones(make, tmp_path, monkeypatch):  # noqa: F811
    policy = make()
    policy.save(tmp_path, "step-000001", {"step": 1}, keep=1)

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", crash)
    with pytest.raises(KeyboardInterrupt):
        policy.save(tmp_path, "step-000002", {"step": 2}, keep=1)
    assert checkpoints(tmp_path) == [tmp_path / "step-000001"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("file write failed")])
def test_a_disk_without_room_is_named_and_leaves_the_old_ones(make, tmp_path, monkeypatch, error):  # noqa: F811
    policy, root = make(), tmp_path / "checkpoints"
    policy.save(root, "step-000001", {"step": 1}, keep=1)

    def refuse(*_):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", refuse)
        with pytest.raises(TrainingError, match=r"step-000002 cannot be written: .*; the same command resumes"):
            policy.save(root, "step-000002", {"step": 2}, keep=1)
    assert [p.name for p in root.iterdir()] == ["step-000001"]
    policy.save(root, "step-000002", {"step": 2}, keep=1)
    assert [p.name for p in root.iterdir()] == ["step-000002"]


def test_wrong_folders_are_refused(make, tmp_path):  # noqa: F811
    policy = make()
    with pytest.raises(TrainingError, match="is not a checkpoint"):
        policy.load(tmp_path)
    with pytest.raises(TrainingError, match="not of the form step-N"):
        policy.save(tmp_path, "latest", {}, keep=1)
    path = policy.save(tmp_path, "step-000001", {}, keep=1)
    (path / "optimizer.pt").write_bytes(b"nonsense")
    with pytest.raises(TrainingError, match="damaged"):
        policy.load(path)
    (path / "state.json").write_text('{"format": 99}')
    with pytest.raises(TrainingError, match="not of checkpoint format 1"):
        policy.load(path)
