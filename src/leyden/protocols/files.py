"""Files in a conversation, as text: documents, search results, attachments.

What is no text is named in its place: a history that holds one cannot be sent without it. `unshown` counts those.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Any

from leyden.types import Json

_PLAIN_ALPHABET = str.maketrans("-_", "+/")
# By their type, as Anthropic and OpenAI write them.
_KINDS = {
    "document": "document",
    "search_result": "document",
    "file": "file",
    "input_file": "file",
    "input_audio": "audio",
    "audio": "audio",
    "input_video": "video",
    "video_url": "video",
    "container_upload": "container_upload",
}
_NAMES = ("filename", "title", "file_id", "fileUri", "url", "file_url")


def is_file(block: Json) -> bool:
    """Whether a block or part holds a file in some form."""
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in _KINDS:
        return False
    inner = {"document": "source", "search_result": "content", "file": "file"}.get(kind)
    if inner is not None:
        return isinstance(block.get(inner), dict | list)
    return kind != "input_file" or any(isinstance(block.get(n), str) for n in ("file_data", "file_id", "file_url"))


def file_text(block: Json) -> str:
    """Its text after its title, or a placeholder."""
    text = _text(block)
    if text is None:
        return placeholder(_KINDS[block["type"]], block)
    head = [block.get(name) for name in ("title", "source", "context") if isinstance(block.get(name), str)]
    return "\n".join([*map(str, head), text])


def decoded(data: Any, media_type: Any = None) -> str | None:
    """The text of base64, or of a `data:` URL; None for what is no UTF-8 text."""
    if not isinstance(data, str):
        return None
    head, comma, rest = data.partition(",")
    if data.startswith("data:") and comma:
        media_type, data = head.removeprefix("data:").partition(";")[0], rest
    if isinstance(media_type, str) and media_type.startswith(("image/", "audio/", "video/", "application/pdf")):
        return None
    try:
        text = base64.b64decode(data.translate(_PLAIN_ALPHABET), validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    return None if "\0" in text else text


def placeholder(kind: str, block: Json) -> str:
    """What stands in the place of a file that cannot be shown."""
    inner = [block, *(value for value in block.values() if isinstance(value, dict))]
    names = [part[name] for part in inner for name in _NAMES if isinstance(part.get(name), str)]
    named = f" {names[0][:200]!r}" if names and not names[0].startswith("data:") else ""
    return f"[{kind}{named}: not shown, for it is no text]"


def unshown(messages: Any) -> list[str]:
    """What `file_text` has only a placeholder for, named as fields are: `content.document`."""
    return [f"content.{_KINDS[block['type']]}" for block in _files(messages) if _text(block) is None]


def _files(value: Any) -> Iterator[Json]:
    """The files in a list of messages, of items or of blocks."""
    for item in value if isinstance(value, list) else ():
        if isinstance(item, dict) and is_file(item):
            yield item
        elif isinstance(item, dict):
            yield from _files(item.get("content"))
            yield from _files(item.get("output"))


def _text(block: Json) -> str | None:
    if block["type"] == "search_result":
        return _texts(block["content"])
    if block["type"] == "document":
        source = block["source"]
        if not isinstance(source, dict):
            return None
        if source.get("type") == "text":
            return source["data"] if isinstance(source.get("data"), str) else None
        if source.get("type") == "content":
            return _texts(source.get("content"))
        return decoded(source.get("data"), source.get("media_type"))
    held = block.get("file") if block["type"] == "file" else block
    return decoded(held.get("file_data")) if isinstance(held, dict) else None


def _texts(content: Any) -> str | None:
    """The text of a string or of blocks that are all text."""
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else [content]
    texts = [block.get("text") for block in blocks if isinstance(block, dict)]
    if len(texts) < len(blocks) or not all(isinstance(text, str) for text in texts):
        return None
    return "\n".join(map(str, texts))
