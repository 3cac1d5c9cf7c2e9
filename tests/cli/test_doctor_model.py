"""The tokenizer, renderer and chat template that `leyden doctor` tries."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from leyden.doctor.chat_template import read_chat_template
from leyden.doctor.findings import Level
from leyden.doctor.model import COMMAND, TOOL, check_renderer, check_template, round_trip
from leyden.gateway.render import ModelRenderer
from leyden.run_file import load
from tests.qwen_tokenizers import qwen_tokenizer_folder


class Spelled:
    """A renderer of one token per character, whose conversation goes on as a test wants it."""

    stop_token_ids = [ord("$")]  # noqa: RUF012

    def __init__(self, parsed: str = COMMAND, bridge: str | None = "{}R>", head: str = "U>", end: str = "$") -> None:
        self._parsed, self._bridge, self._head, self._end = parsed, bridge, head, end

    def render(self, messages: Any, tools: Any) -> list[int]:
        return ids("U>" if len(messages) == 2 else f"{self._head}C{self._end}R>")

    def parse(self, sampled: list[int], prompt: list[int], tools: Any, **_: Any) -> dict[str, Any]:
        call = {"function": {"name": "shell", "arguments": {"command": self._parsed}}}
        return {"content": "C", "tool_calls": [call] if self._parsed else []}

    def bridge(self, prompt: list[int], sampled: list[int], *_: Any, reasoning: bool) -> list[int] | None:
        return None if self._bridge is None else ids(self._bridge.format(text([*prompt, *sampled])))

    def encode(self, spelled: str, *, add_special_tokens: bool) -> list[int]:
        return ids(spelled)

    def decode(self, tokens: Any) -> str:
        return text(tokens)


def ids(spelled: str) -> list[int]:
    return [ord(c) for c in spelled]


def text(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


@pytest.mark.parametrize(
    ("renderer", "broken", "differs"),
    [
        (Spelled(), "", ""),
        (Spelled(parsed=""), "is parsed as 'C', sampled was 'C$'", ""),
        (Spelled("ls"), "is parsed as [{'name': 'shell', 'arguments': {'command': 'ls'}}], sampled was 'C$'", ""),
        (Spelled(end=""), "ends with none of the renderer's stop tokens", ""),
        (Spelled(bridge=None), "", "its sampled ids are not continued"),
        (Spelled(bridge="{}r>"), "", "the next prompt is not the template's: at character 4 'r>', not 'R>'"),
        (Spelled(head="V>"), "", "the template shows the turns before otherwise: at character 0 'V>C$R>', not 'U>'"),
    ],
)  # fmt: skip
def test_round_trip_of_a_tool_call(renderer, broken, differs):
    assert round_trip(renderer, "") == (broken, differs)


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_round_trip_with_real_vocabularies(family):
    renderer = ModelRenderer(str(qwen_tokenizer_folder(family)), family, "template")
    assert check_renderer(renderer, family).line == (
        f"ok       renderer     {family}: a tool call is parsed, and with its result goes on as the template shows it"
    )


def test_the_folders_own_template(tmp_path, make):
    """A server of the trained model uses the folder's template, so it must show what is trained."""
    folder = tmp_path / "model"
    shutil.copytree(qwen_tokenizer_folder("qwen3"), folder)
    shutil.copy(Path(__file__).parents[1] / "vllm" / "qwen3.jinja", folder / "chat_template.jinja")
    config = load(make(model={"path": str(folder)}))
    renderer = ModelRenderer(str(folder), "qwen3", "template")
    template = read_chat_template(str(folder))
    assert (
        check_template(config.model, renderer, template).what
        == "the model's own chat template gives the renderer's text"
    )
    changed = (folder / "chat_template.jinja").read_text().replace("# Tools", "## Tools")
    (folder / "chat_template.jinja").write_text(changed)
    finding = check_template(config.model, renderer, read_chat_template(str(folder)))
    assert finding.level is Level.WARNING
    assert finding.what.startswith("the model's own chat template is not the renderer's: at character 50 ' Tools")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no tools') }}")
    assert check_template(config.model, renderer, read_chat_template(str(folder))).what.endswith(
        "its chat template fails: TemplateError: no tools"
    )
    (folder / "chat_template.jinja").unlink()
    assert read_chat_template(str(folder)) is None


TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
  {%- else %}
    {{- message.role ~ ': ' ~ message.content ~ '\n' }}
  {%- endif %}
  {%- if loop.index == 5 %}{% break %}{% endif %}
{%- endfor %}
{{- tools | tojson }} {{ [1] | tojson(indent=2) }}{% if add_generation_prompt %}>{% endif %}
"""


def test_templates_are_rendered_as_transformers_does(tmp_path, tokenizer_path):
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    shutil.copytree(tokenizer_path, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"bos_token": "<s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    messages = [{"role": "user", "content": "<é>"}, {"role": "assistant", "content": "b"}]
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
    template = read_chat_template(str(folder))
    assert template.text(messages, [TOOL]) == theirs
    assert "<é>" in theirs
