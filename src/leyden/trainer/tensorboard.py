"""The numbers of metrics.jsonl for TensorBoard."""

from __future__ import annotations

from pathlib import Path

from leyden.types import Json


class TensorBoard:
    """Scalars at explicit steps. A resumed run writes a file of its own that supersedes later steps."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def add(self, line: Json) -> None:
        for name, value in scalars(line).items():
            if value is not None:
                self._writer.add_scalar(name, value, line["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def scalars(line: Json) -> dict[str, float | None]:
    """The TensorBoard scalars of a line: its numbers, those of nested mappings by path."""
    if line["event"] == "eval":
        prefix = "validation"
        passes = {f"{prefix}/pass@{p['k']}": p["value"] for p in line["pass"]}
        outcomes = {f"{prefix}/outcomes/{kind}": n for kind, n in (line.get("outcomes") or {}).items()}
        return passes | outcomes | {f"{prefix}/reward": line["mean_reward"], f"{prefix}/coverage": line["coverage"]}
    flat: dict[str, float | None] = {}
    for name, value in line.items():
        if isinstance(value, dict):
            flat.update({f"{name}/{key}": v for key, v in value.items() if isinstance(v, int | float)})
        elif isinstance(value, int | float) and name not in ("step", "time"):
            flat[f"train/{name}"] = value
    return flat
