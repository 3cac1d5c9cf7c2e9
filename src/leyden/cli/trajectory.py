"""One attempt as text: each turn with its context and what was sampled, and which of it is trained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from leyden.cli.screen import Line
from leyden.trajectory.divergence import divergence
from leyden.trajectory.kinds import Kind, conversations
from leyden.trajectory.samples import build_samples, trainable_logprobs
from leyden.trajectory.tree import build_tree
from leyden.types import Ids, Json, Sample, Turn

Decode = Callable[[Ids], str]
TRAINED, SAMPLED, CONTEXT = "bold green", "yellow", "dim"
SHOWN_TOKENS, SHOWN_CHARS = 12, 60


def trajectory_lines(
    turns: Sequence[Turn], decode: Decode, max_tokens: int | None = None, untrained: str | None = None
) -> list[Line]:
    """A header per turn, the ids it adds as context (`| `), the ids it sampled (`> ` trained, `x ` not trained). `~ `
    says where a tree that begins afresh differs from the turn that it did not continue. `untrained` is why nothing of
    the rollout is trained.
    """
    if not turns:
        return [Line("no model call was recorded")]
    built = build_samples(turns, max_tokens)
    trained_by = {} if untrained else sample_of_turn(built.samples)
    notes = turn_notes(turns)
    diverged = divergences(turns, decode)
    lines = []
    for turn in build_tree(turns).turns.values():
        number = trained_by.get(turn.turn_id)
        lines.append(Line(turn_header(turn, number, notes.get(turn.turn_id, ())), "bold cyan"))
        if turn.turn_id in diverged:
            lines.append(Line("~ " + diverged[turn.turn_id], SAMPLED))
        lines += _marked("| ", decode(turn.delta_P), CONTEXT)
        if len(turn.sampled_T):
            mark, style = ("> ", TRAINED) if number is not None else ("x ", SAMPLED)
            lines += _marked(mark, decode(turn.sampled_T), style)
    summaries = "; ".join(sample_summary(sample, trained=not untrained) for sample in built.samples)
    ending = f"; nothing of it is trained: {untrained}" if untrained else ""
    lines.append(Line(f"{len(built.samples)} samples: {summaries}{ending}", "bold"))
    return lines


def trajectory_json(
    turns: Sequence[Turn], decode: Decode, max_tokens: int | None = None, untrained: str | None = None
) -> list[Json]:
    """The turns as `trajectory_lines` shows them. `sample` numbers the sample that trains a turn, null without one."""
    trained_by = {} if untrained or not turns else sample_of_turn(build_samples(turns, max_tokens).samples)
    notes = turn_notes(turns) if turns else {}
    return [
        {
            "turn_id": turn.turn_id,
            "continues": turn.parent_id,
            "versions": [[span.version, span.length] for span in turn.spans],
            "context": decode(turn.delta_P),
            "context_tokens": len(turn.delta_P),
            "sampled": decode(turn.sampled_T),
            "sampled_tokens": len(turn.sampled_T),
            "finish_reason": str(turn.finish_reason),
            "sample": trained_by.get(turn.turn_id),
            "notes": list(notes.get(turn.turn_id, ())),
        }
        for turn in turns
    ]


def sample_of_turn(samples: Sequence[Sample]) -> dict[int, int]:
    """Number (from 1) of the sample that trains a turn: the first one on whose path it lies."""
    owner: dict[int, int] = {}
    for number, sample in enumerate(samples, start=1):
        for turn_id in sample.turn_ids:
            owner.setdefault(turn_id, number)
    return owner


def turn_notes(turns: Sequence[Turn]) -> dict[int, list[str]]:
    """The kind of the conversation, unless it is the main one, and the cause of a fork."""
    notes: dict[int, list[str]] = defaultdict(list)
    for one in conversations(turns):
        for turn_id in one.turns if one.kind is not Kind.MAIN else ():
            notes[turn_id].append(one.kind)
        for fork in one.forks:
            notes[fork.turn_id].append(f"fork: {fork.cause}")
    return notes


def divergences(turns: Sequence[Turn], decode: Decode) -> dict[int, str]:
    """For each tree that begins afresh, the words at which it differs from an earlier turn."""
    tree = build_tree(turns)
    said = {}
    for one in conversations(turns):
        for root in one.roots[1:]:
            if (diverged := divergence(tree, one, root)) is not None:
                theirs, ours = (_cut(decode(ids[:SHOWN_TOKENS])) for ids in (diverged.theirs, diverged.ours))
                said[root] = f"as turn {diverged.turn_id} for {diverged.shared} tokens, then {ours} instead of {theirs}"
    return said


def _cut(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…") if text else "nothing"


def turn_header(turn: Turn, sample: int | None, notes: Sequence[str] = ()) -> str:
    """`turn 7 continues 5 | version 3 | 120 context, 40 sampled | logprob mean -0.21 | stop | sample 1`."""
    start = f"turn {turn.turn_id} " + ("starts" if turn.parent_id is None else f"continues {turn.parent_id}")
    versions = ", ".join(
        f"{s.version} ({s.length} tokens)" if len(turn.spans) > 1 else str(s.version) for s in turn.spans
    )
    logprobs = trainable_logprobs(turn)
    mean = "none" if logprobs is None or not len(logprobs) else f"{float(np.mean(logprobs)):.3f}"
    parts = [
        start,
        f"version {versions or 'none'}",
        f"{len(turn.delta_P)} context, {len(turn.sampled_T)} sampled",
        f"logprob mean {mean}",
        str(turn.finish_reason),
        f"sample {sample}" if sample is not None else "not trained",
    ]
    return " | ".join([*parts, *notes])


def sample_summary(sample: Sample, *, trained: bool = True) -> str:
    turns = ", ".join(map(str, sample.turn_ids))
    what = "trained" if trained else "sampled"
    return f"turns {turns}: {int(sample.mask_L.sum())} of {len(sample.ids_L)} tokens {what}"


def decoder(model_path: str) -> Decode:
    """Ids to text with the model's tokenizer, special tokens shown."""
    local = Path(model_path) / "tokenizer.json"
    if local.is_file():
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(str(local))
        return lambda ids: str(fast.decode(ids.tolist(), skip_special_tokens=False))
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(model_path)
    return lambda ids: str(slow.decode(ids.tolist(), skip_special_tokens=False))


def _marked(mark: str, text: str, style: str) -> list[Line]:
    return [Line(mark + line, style) for line in text.split("\n")]
