"""Make the base model of micro_swe: a tiny Qwen3 with its own tokenizer, warm-started on demonstrations.

    python make_base.py [--out base]

Needs torch, transformers, tokenizers and renderers; about seven minutes on one CPU core. The model is trained
in two phases: on mostly right demonstrations, to learn to read and to write, then on deliberately imperfect
ones, which leave it able but careless. Every token is what a gateway produces in deployment: prompts are
rendered by the `renderers` library, a reply is followed by the bridge to the next turn. All demonstrations
are of tasks drawn as the training split is, which share no template and no function name with validation
and test; this is asserted.

`base.json` beside the weights records the hash of this script, of the demonstrations and of the files of
`base/`.
"""

import argparse
import hashlib
import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from demonstrations import Habits, Reply, demonstrate
from harness import MAX_TOKENS, Episode
from renderers import create_renderer
from renderers.configs import Qwen3RendererConfig
from tasks import HELD_OUT_TEMPLATES, WORDS, Split, Task, draw_tasks, is_held_out_name, make_splits, sha256
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = """\
{%- set ns = namespace(last_query=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == 'user' %}
        {%- set ns.last_query = messages|length - 1 - loop.index0 %}
        {%- set ns.found = true %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and loop.last and loop.index0 > ns.last_query %}
        {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}
        {{- message.content.lstrip('\\n') + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
"""Qwen3's template for text messages without tools and reasoning."""


@dataclass(frozen=True)
class Phase:
    """A stretch of training: AdamW for embeddings and norms, Muon for matrices, cosine decay to a tenth."""

    habits: Habits
    steps: int
    adamw_lr: float
    muon_lr: float


@dataclass(frozen=True)
class Recipe:
    seed: int = 1
    vocabulary: int = 768
    tokenizer_demonstrations: int = 2000
    hidden: int = 128
    layers: int = 4
    positions: int = 512
    batch: int = 16
    context_weight: float = 0.15
    """Weight of a token that the agent did not write, beside 1 for one that it wrote."""
    warmup_steps: int = 20
    phases: tuple[Phase, ...] = (
        Phase(Habits(right_operator=0.95, right_function=0.98, lazy=0.02, slip=0.1), 900, 1e-2, 0.06),
        Phase(Habits(right_operator=0.45, right_function=0.85, lazy=0.2, slip=0.2), 150, 4e-3, 0.02),
    )
    evaluation_tasks: int = 128


@dataclass(frozen=True)
class Example:
    """One demonstration as tokens. `mask` is 1 on the tokens of replies to learn from."""

    ids: list[int]
    mask: list[int]


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with Qwen's pre-tokenisation and the special tokens that Qwen3's renderer needs."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(SPECIAL_TOKENS) - len(MARKUP_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_renderer(tokenizer: PreTrainedTokenizerFast) -> Any:
    return create_renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))


def make_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    torch.manual_seed(recipe.seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=recipe.hidden,
            intermediate_size=3 * recipe.hidden,
            num_hidden_layers=recipe.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=recipe.hidden // 4,
            max_position_embeddings=recipe.positions,
            tie_word_embeddings=True,
            attention_bias=False,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            bos_token_id=None,
            eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
            pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        )
    )


class Transcript:
    """The token ids of one episode, turn by turn, as a gateway makes them.

    The first prompt is rendered; a later one is the last kept turn's prompt and reply and the bridge to the
    messages that came after it. A reply that mini dropped leaves no trace.
    """

    def __init__(self, renderer: Any) -> None:
        self.renderer = renderer
        self.kept: tuple[list[int], list[int]] | None = None
        self.messages = 0

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        if self.kept is None:
            return list(self.renderer.render_ids(messages, add_generation_prompt=True))
        bridge = self.renderer.bridge_to_next_turn(*self.kept, messages[self.messages :])
        assert bridge is not None
        return list(bridge.token_ids)

    def keep(self, prompt: list[int], reply: list[int], messages: int) -> None:
        """Record a turn whose reply stands in the conversation, as the last of its `messages` messages."""
        self.kept, self.messages = (prompt, reply), messages


def encode(tokenizer: PreTrainedTokenizerFast, renderer: Any, episode: Episode, replies: list[Reply]) -> Example:
    """The demonstration as one sequence, up to the last reply's end of turn."""
    transcript = Transcript(renderer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids: list[int] = []
    mask: list[int] = []
    remaining = iter(replies)
    for index, message in enumerate(episode.messages):
        if message["role"] == "assistant":
            prompt = transcript.prompt(episode.messages[:index])
            reply = [*tokenizer.encode(message["content"], add_special_tokens=False), end]
            mask += [0] * (len(prompt) - len(ids)) + [int(next(remaining).trained)] * len(reply)
            ids = prompt + reply
            transcript.keep(prompt, reply, index + 1)
    assert len(ids) == len(mask)
    return Example(ids, mask)


def demonstration_text(episode: Episode) -> str:
    return "".join(f"{message['role']}\n{message['content']}\n" for message in episode.messages)


class Demonstrations:
    """An endless stream of demonstrations, disjoint from validation and test by template and by name."""

    def __init__(self, seed: int) -> None:
        self.tasks = draw_tasks("train", seed)
        self.rng = random.Random(seed)
        self.digest = hashlib.sha256()
        self.count = 0

    def next(self, habits: Habits) -> tuple[Episode, list[Reply]]:
        task = next(self.tasks)
        assert all((f.family, f.operator) not in HELD_OUT_TEMPLATES for f in task.functions), task
        assert not any(is_held_out_name(f.name) for f in task.functions), task
        episode, replies = demonstrate(task, self.rng, habits)
        self.digest.update(demonstration_text(episode).encode())
        self.count += 1
        return episode, replies


def tokenizer_texts(source: Demonstrations, recipe: Recipe) -> list[str]:
    """The first demonstrations, from which the tokenizer is made."""
    habits = recipe.phases[-1].habits
    return [demonstration_text(source.next(habits)[0]) for _ in range(recipe.tokenizer_demonstrations)]


def encoded(
    source: Demonstrations, habits: Habits, tokenizer: PreTrainedTokenizerFast, renderer: Any
) -> Iterator[Example]:
    while True:
        yield encode(tokenizer, renderer, *source.next(habits))


def batches(examples: Iterator[Example], size: int, steps: int) -> Iterator[list[Example]]:
    """Batches of examples of similar length: eight batches are drawn at a time and sorted."""
    shuffle = random.Random(0)
    for start in range(0, steps, 8):
        count = min(8, steps - start)
        pool = sorted((next(examples) for _ in range(count * size)), key=lambda e: len(e.ids))
        groups = [pool[i * size : (i + 1) * size] for i in range(count)]
        shuffle.shuffle(groups)
        yield from groups


def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=dtype)


def losses(model: Qwen3ForCausalLM, batch: list[Example], context_weight: float) -> tuple[torch.Tensor, float]:
    """(weighted mean cross-entropy, mean cross-entropy of the tokens to learn)."""
    ids = padded([e.ids for e in batch], torch.long)
    learn = padded([e.mask for e in batch], torch.float)[:, 1:]
    real = padded([[1] * len(e.ids) for e in batch], torch.float)[:, 1:]
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    each = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    weight = learn + context_weight * (real - learn)
    return (each * weight).sum() / weight.sum(), float((each.detach() * learn).sum() / learn.sum())


def schedule(step: int, phase: Phase, warmup_steps: int) -> float:
    """Factor of the learning rates at a step: linear warm-up, then a half cosine down to a tenth."""
    cosine = 0.5 * (1 + torch.cos(torch.tensor(step / phase.steps * torch.pi)).item())
    return min(1.0, (step + 1) / warmup_steps) * (0.1 + 0.9 * cosine)


def train_phase(
    model: Qwen3ForCausalLM, phase: Phase, recipe: Recipe, examples: Iterator[Example], log_every: int = 50
) -> None:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    adamw = torch.optim.AdamW(others, lr=phase.adamw_lr, betas=(0.9, 0.98), weight_decay=0.01)
    muon = torch.optim.Muon(matrices, lr=phase.muon_lr, weight_decay=0.0, momentum=0.95)
    started = time.perf_counter()
    model.train()
    for step, batch in enumerate(batches(examples, recipe.batch, phase.steps)):
        loss, reply_loss = losses(model, batch, recipe.context_weight)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = schedule(step, phase, recipe.warmup_steps)
        for optimizer, rate in ((adamw, phase.adamw_lr), (muon, phase.muon_lr)):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % log_every == 0:
            passed = f"{time.perf_counter() - started:.0f} s"
            print(f"step {step + 1} loss {loss.item():.3f} replies {reply_loss:.4f} {passed}", flush=True)


@torch.no_grad()
def sample_replies(model: Qwen3ForCausalLM, prompts: list[list[int]], stop: Sequence[int]) -> list[list[int]]:
    """One sampled reply (temperature 1, at most MAX_TOKENS ids, the stop id included) for each prompt."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    attended = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        input_ids=ids,
        attention_mask=attended,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=MAX_TOKENS,
        eos_token_id=list(stop),
        pad_token_id=0,
    )
    return [until_stop(row, stop) for row in out[:, width:].tolist()]


def until_stop(ids: list[int], stop: Sequence[int]) -> list[int]:
    for index, token in enumerate(ids):
        if token in stop:
            return ids[: index + 1]
    return ids


def play(model: Qwen3ForCausalLM, renderer: Any, tasks: list[Task], size: int = 64) -> list[Episode]:
    """Run the model on the tasks in the emulated harness, `size` at a time."""
    model.eval()
    episodes = [Episode(task) for task in tasks]
    stop = renderer.get_stop_token_ids()
    for start in range(0, len(episodes), size):
        chunk = [(episode, Transcript(renderer)) for episode in episodes[start : start + size]]
        while running := [(e, t) for e, t in chunk if not e.done]:
            prompts = [t.prompt(e.messages) for e, t in running]
            if max(map(len, prompts)) + MAX_TOKENS > model.config.max_position_embeddings:
                raise ValueError("a prompt leaves no room for a reply")
            replies = sample_replies(model, prompts, stop)
            for (episode, transcript), prompt, reply in zip(running, prompts, replies, strict=True):
                content = renderer.parse_response(reply, prompt_ids=prompt).content
                before = len(episode.messages)
                if episode.answer(content):
                    transcript.keep(prompt, reply, before + 1)
    return episodes


def measure(model: Qwen3ForCausalLM, renderer: Any, tasks: list[Task], seed: int) -> dict[str, float]:
    """Shares of episodes: fixed (`pass_at_1`), and by what else happened."""
    torch.manual_seed(seed)
    episodes = play(model, renderer, tasks)
    count = len(episodes)
    return {
        "pass_at_1": sum(e.workspace.reward() for e in episodes) / count,
        "unedited": sum(e.workspace.source == e.task.source() for e in episodes) / count,
        "submitted": sum(e.exit_status == "Submitted" for e in episodes) / count,
        "calls": sum(e.calls for e in episodes) / count,
    }


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_base(recipe: Recipe, out: Path) -> dict[str, Any]:
    """Train, write `out`, and return what `base.json` holds."""
    started = time.perf_counter()
    source = Demonstrations(recipe.seed)
    texts = tokenizer_texts(source, recipe)
    tokenizer = train_tokenizer(texts, recipe.vocabulary)
    split = [w for w in WORDS for text in (f" {w}", f"_{w}") if len(tokenizer.tokenize(text)) > 1]
    print(f"vocabulary {len(tokenizer)}; words of more than one token: {sorted(set(split)) or 'none'}")
    renderer = make_renderer(tokenizer)
    model = make_model(recipe, tokenizer)
    counts: dict[Split, int] = {"train": 0, "validation": recipe.evaluation_tasks, "test": 0}
    validation = make_splits(counts, seed=0)["validation"]
    measured = {}
    for number, phase in enumerate(recipe.phases, 1):
        train_phase(model, phase, recipe, encoded(source, phase.habits, tokenizer, renderer))
        measured[f"phase_{number}"] = measure(model, renderer, validation, recipe.seed)
        print(f"phase {number}: {measured[f'phase_{number}']}", flush=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    record = {
        "script_sha256": sha256_of(Path(__file__)),
        "first_200_demonstrations_sha256": sha256("".join(texts[:200])),
        "demonstrations_sha256": source.digest.hexdigest(),
        "demonstrations": source.count,
        "seed": recipe.seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "validation": measured,
        "seconds": round(time.perf_counter() - started),
        "files": {path.name: sha256_of(path) for path in sorted(out.iterdir()) if path.name != "base.json"},
    }
    (out / "base.json").write_text(json.dumps(record, indent=2) + "\n")
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tiny base model of micro_swe.")
    parser.add_argument("--out", type=Path, default=HERE / "base")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(make_base(Recipe(), arguments.out), indent=2))


if __name__ == "__main__":
    main()
