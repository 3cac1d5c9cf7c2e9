"""Files in a conversation, on every protocol: text is shown, what is none is a placeholder and counted."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from leyden.types import Json
from tests.protocols.test_all_protocols import CALL, PROTOCOLS

TEXT, PDF = base64.b64encode("é = 1\n".encode()).decode(), base64.b64encode(b"%PDF-1.4\xff").decode()
PDF_SOURCE = {"type": "base64", "media_type": "application/pdf", "data": PDF}
SOURCE = {"type": "text", "media_type": "text/plain", "data": "the text"}
RESULT = {"type": "search_result", "title": "T", "source": "https://x", "content": [{"type": "text", "text": "found"}]}
ANTHROPIC: list[tuple[Json, str, int]] = [
    ({"type": "document", "source": SOURCE}, "the text", 0),
    ({"type": "document", "title": "T", "context": "C", "source": SOURCE}, "T\nC\nthe text", 0),
    ({"type": "document", "source": {"type": "content", "content": "text"}}, "text", 0),
    (
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "a"}] * 2}},
        "a\na",
        0,
    ),
    (
        {
            "type": "document",
            "title": "a.pdf",
            "source": {"type": "base64", "media_type": "application/pdf", "data": PDF},
        },
        "[document 'a.pdf': not shown, for it is no text]",
        1,
    ),
    (
        {"type": "document", "source": {"type": "url", "url": "https://x/a.pdf"}},
        "[document 'https://x/a.pdf': not shown, for it is no text]",
        1,
    ),
    (
        {"type": "document", "source": {"type": "file", "file_id": "f"}},
        "[document 'f': not shown, for it is no text]",
        1,
    ),
    (RESULT, "T\nhttps://x\nfound", 0),
]


@pytest.mark.parametrize(("block", "text", "count"), ANTHROPIC)
@pytest.mark.parametrize("in_result", [False, True])
def test_anthropic(block: Json, text: str, count: int, in_result: bool) -> None:
    content = [{"type": "tool_result", "tool_use_id": "c", "content": [block]}] if in_result else [block]
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": content}]}
    request = PROTOCOLS["anthropic-messages"].parse(body, CALL)
    assert request.messages[-1]["content"] == text
    assert request.unmet == ("content.document",) * count


OPENAI: list[tuple[Json, str, int]] = [
    ({"file_data": f"data:text/x-python;base64,{TEXT}", "filename": "a.py"}, "é = 1\n", 0),
    ({"file_data": TEXT, "filename": "a.py"}, "é = 1\n", 0),
    (
        {"file_data": f"data:application/pdf;base64,{PDF}", "filename": "a.pdf"},
        "[file 'a.pdf': not shown, for it is no text]",
        1,
    ),
    ({"file_id": "file-1"}, "[file 'file-1': not shown, for it is no text]", 1),
]


@pytest.mark.parametrize(("file", "text", "count"), OPENAI)
def test_openai(file: Json, text: str, count: int) -> None:
    of_chat: Any = [{"role": "user", "content": [{"type": "file", "file": file}]}]
    of_responses: Any = [{"role": "user", "content": [{"type": "input_file", **file}]}]
    of_output: Any = [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file", **file}]}]
    for name, body in (
        ("openai-chat", {"messages": of_chat}),
        ("openai-responses", {"input": of_responses}),
        ("openai-responses", {"input": of_output}),
    ):
        request = PROTOCOLS[name].parse({"model": "m", **body}, CALL)
        assert request.messages[-1]["content"] == text
        assert request.unmet == ("content.file",) * count


def test_audio_is_named_in_its_place() -> None:
    audio = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    body = {"model": "m", "messages": [{"role": "user", "content": [audio, {"type": "text", "text": "hear"}]}]}
    request = PROTOCOLS["openai-chat"].parse(body, CALL)
    assert request.messages[0]["content"] == "[audio: not shown, for it is no text]hear"
    assert request.unmet == ("content.audio",)


@pytest.mark.parametrize(
    ("part", "text", "count"),
    [
        ({"inlineData": {"mimeType": "text/plain", "data": TEXT}}, "é = 1\n", 0),
        ({"inline_data": {"mime_type": "application/json", "data": TEXT}}, "é = 1\n", 0),
        ({"inlineData": {"mimeType": "application/pdf", "data": PDF}}, "[file: not shown, for it is no text]", 1),
        (
            {"fileData": {"mimeType": "text/plain", "fileUri": "gs://a/b"}},
            "[file 'gs://a/b': not shown, for it is no text]",
            1,
        ),
    ],
)
def test_gemini(part: Json, text: str, count: int) -> None:
    request = PROTOCOLS["gemini"].parse({"contents": [{"role": "user", "parts": [part]}]}, CALL)
    assert request.messages == [{"role": "user", "content": text}]
    assert request.unmet == ("content.file",) * count
