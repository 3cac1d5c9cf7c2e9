"""A model folder's chat template, rendered as transformers renders it, without transformers.

Source of the settings: `transformers.utils.chat_template_utils._compile_jinja_template`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from leyden.types import Json


class ChatTemplate:
    """Raises jinja2's errors, and whatever else a template can."""

    def __init__(self, source: str, special: dict[str, str]) -> None:
        self.knows_tools = "tools" in source
        self._special = special
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
        self._template = environment.from_string(source)

    def text(self, messages: Sequence[Json], tools: Sequence[Json], variables: Json | None = None) -> str:
        known = {"messages": list(messages), "tools": list(tools) or None, "documents": None}
        return self._template.render(**(known | (variables or {})), add_generation_prompt=True, **self._special)


def read_chat_template(model_path: str) -> ChatTemplate | None:
    """Of a model folder or hub id: `chat_template.jinja`, or what tokenizer_config.json has under `chat_template`, the
    one named `default` where there are several. Raises OSError, ValueError and jinja2's errors.
    """
    document = json.loads(_file(model_path, "tokenizer_config.json") or "{}")
    source = document.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    source = _file(model_path, "chat_template.jinja") or source
    return None if source is None else ChatTemplate(source, _special(document))


def _file(model_path: str, name: str) -> str | None:
    if Path(model_path).is_dir():
        path = Path(model_path, name)
        return path.read_text(encoding="utf-8") if path.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(model_path, name)).read_text(encoding="utf-8")
    except EntryNotFoundError:
        return None


class _Generation(Extension):
    """`{% generation %}` marks what a model says; it shows its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own attribute)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _special(document: Json) -> dict[str, str]:
    """Special tokens by name, such as `bos_token`; each is written as its text or as an object that holds it."""
    texts = {n: v.get("content") if isinstance(v, dict) else v for n, v in document.items() if n.endswith("_token")}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
