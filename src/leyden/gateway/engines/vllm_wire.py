"""What vLLM is sent and what it answers, on the three routes that give token ids. Pure.

    GENERATE      ids in, ids out, and which weights sampled which token
    COMPLETIONS   ids in, ids out with `return_token_ids`; older servers spell ids as `token_id:N` in the log-probs
    CHAT          messages in; the ids of the prompt that vLLM rendered, the sampled ids, and the message it parsed

Every sampling parameter is sent, so that none is taken from the model's generation_config.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from leyden.errors import CaptureError
from leyden.gateway.engines.base import (
    ChatAnswer,
    ChatCall,
    GenerateRequest,
    Sampling,
    covering,
    finish_reason,
    finite,
    prompt_ids,
    sampled_ids,
)
from leyden.protocols.checks import arguments_of, arguments_text
from leyden.types import FinishReason, Generation, Json, VersionSpan

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
TOKENIZE = "/tokenize"

_SPELT = "token_id:"
_PROMPT_IDS = b'"prompt_token_ids":['


def generate_body(request: GenerateRequest) -> Json:
    """For GENERATE. Text is made only where stop strings need it, special tokens included."""
    return {
        "token_ids": request.prompt_ids,
        "sampling_params": {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "seed": request.seed,
            "stop": list(request.stop),
            "stop_token_ids": list(request.stop_token_ids),
            "logprobs": 0,
            "detokenize": bool(request.stop),
            "skip_special_tokens": False,
        },
    }


def completion_body(request: GenerateRequest, model: str | None) -> Json:
    """For COMPLETIONS with a prompt of ids."""
    sampling = Sampling(request.temperature, request.top_p, request.top_k, request.seed, request.stop)
    return {
        **_common(sampling, model),
        "prompt": request.prompt_ids,
        "max_tokens": request.max_tokens,
        "stop_token_ids": list(request.stop_token_ids),
        "add_special_tokens": False,
        "skip_special_tokens": False,
        "logprobs": 0,
    }


def prompt_body(call: ChatCall, model: str | None) -> Json:
    """For COMPLETIONS with a harness's own prompt, text or ids. `call.sampling.max_tokens` must be set."""
    return {
        **_common(call.sampling, model),
        "prompt": call.prompt,
        "max_tokens": call.sampling.max_tokens,
        "logprobs": 0,
    }


def chat_body(call: ChatCall, model: str | None) -> Json:
    """For CHAT."""
    body = {
        **_common(call.sampling, model),
        "messages": [_message(message) for message in call.messages],
        "logprobs": True,
        "top_logprobs": 0,
    }
    if call.template_kwargs:
        body["chat_template_kwargs"] = call.template_kwargs
    if call.tools:
        body |= {"tools": call.tools, "tool_choice": "auto" if call.calls else "none"}
    if call.sampling.max_tokens is not None:
        body["max_completion_tokens"] = call.sampling.max_tokens
    return body


def tokenize_body(call: ChatCall, model: str | None) -> Json:
    """For TOKENIZE."""
    named = {} if model is None else {"model": model}
    if call.prompt is not None:
        return {**named, "prompt": call.prompt}
    tools = {"tools": call.tools} if call.tools else {}
    kwargs = {"chat_template_kwargs": call.template_kwargs} if call.template_kwargs else {}
    return {**named, "messages": [_message(message) for message in call.messages], **tools, **kwargs}


def read_generate(answer: Any, request: GenerateRequest) -> Generation:
    """Raises CaptureError for an answer that cannot be recorded exactly; so do the other readers."""
    choice = _choice(answer)
    ids = sampled_ids(choice.get("token_ids"))
    _check_usage(answer, len(request.prompt_ids), len(ids))
    entries = _Entries(_column(choice, "logprob"), of_these=_column(choice, "token_id") == ids)
    return _generation(answer, ids, entries, request.stop, request.version)


def read_completion(answer: Any, request: GenerateRequest) -> Generation:
    choice = _choice(answer)
    ids = sampled_ids(_completion_ids(choice))
    shown = choice.get("prompt_token_ids")
    if shown is not None and shown != request.prompt_ids:
        raise CaptureError("the engine's prompt_token_ids are not the prompt that it was sent")
    _check_usage(answer, len(request.prompt_ids), len(ids))
    return _generation(answer, ids, _token_logprobs(choice, ids), request.stop, request.version)


def read_prompt(answer: Any, call: ChatCall) -> ChatAnswer:
    """The answer to `prompt_body`: its message is plain text."""
    choice = _choice(answer)
    ids = sampled_ids(_completion_ids(choice))
    prompt_P = prompt_ids(choice.get("prompt_token_ids"))
    _check_usage(answer, len(prompt_P), len(ids))
    generation = _generation(answer, ids, _token_logprobs(choice, ids), call.sampling.stop, call.version)
    return ChatAnswer(prompt_P, generation, {"role": "assistant", "content": choice.get("text") or ""})


def ids_apart(raw: bytes) -> tuple[bytes, NDArray[np.int64] | None]:
    """The JSON of an answer without its long list of prompt ids, and these; None where they are not found.

    Read from their digits they cost a third of what they do as numbers of Python. In JSON text the name with its quotes
    and colon cannot be part of a string.
    """
    begin = raw.find(_PROMPT_IDS) + len(_PROMPT_IDS)
    end = raw.find(b"]", begin)
    if begin < len(_PROMPT_IDS) or end < 0 or raw.find(_PROMPT_IDS, end) >= 0:
        return raw, None
    digits = raw[begin:end]
    try:
        ids = np.fromstring(digits, dtype=np.int64, sep=",")
    except ValueError:
        return raw, None
    if len(ids) != 1 + np.count_nonzero(np.frombuffer(digits, dtype=np.uint8) == ord(",")):
        return raw, None
    return raw[: begin - 1] + b"null" + raw[end + 1 :], ids


def read_chat(answer: Any, call: ChatCall, apart: NDArray[np.int64] | None = None) -> ChatAnswer:
    """`apart` are the prompt's ids where they were not left in `answer`."""
    choice = _choice(answer)
    ids = sampled_ids(choice.get("token_ids"))
    prompt_P = prompt_ids(answer.get("prompt_token_ids") if apart is None else apart)
    _check_usage(answer, len(prompt_P), len(ids))
    entries = _Entries(_column(choice, "logprob"), of_these=_may_be(_column(choice, "token"), ids))
    generation = _generation(answer, ids, entries, call.sampling.stop, call.version, call.sampling.max_tokens)
    return ChatAnswer(prompt_P, generation, _reply(choice.get("message")))


def context_lengths(body: bytes) -> list[int]:
    """The longest sequences of the models in a list of models, where it says them."""
    try:
        lengths = [model.get("max_model_len") for model in orjson.loads(body)["data"]]
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
        return []
    return [length for length in lengths if isinstance(length, int)]


def _common(sampling: Sampling, model: str | None) -> Json:
    """What COMPLETIONS and CHAT share."""
    named = {} if model is None else {"model": model}
    return {
        **named,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "seed": sampling.seed,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop": list(sampling.stop),
        "n": 1,
        "stream": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def _message(message: Json) -> Json:
    """A message in OpenAI's shape. Reasoning goes under both its names: servers read one or the other."""
    wire = dict(message)
    if reasoning := message.get("reasoning_content"):
        wire["reasoning"] = reasoning
    if calls := message.get("tool_calls"):
        wire["tool_calls"] = [_wire_call(call, f"call_{i}") for i, call in enumerate(calls)]
    return wire


def _wire_call(call: Json, fallback_id: str) -> Json:
    function = call["function"] | {"arguments": arguments_text(call["function"]["arguments"])}
    return {"id": call.get("id") or fallback_id, "type": "function", "function": function}


def _choice(answer: Any) -> Json:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise CaptureError("the engine's answer does not have exactly one choice")
    choice: Json = choices[0]
    return choice


def _check_usage(answer: Json, prompt: int, sampled: int) -> None:
    """Usage counts what the engine worked on: where it disagrees with the ids, some are missing."""
    usage = answer.get("usage") or {}
    for name, count in (("prompt_tokens", prompt), ("completion_tokens", sampled)):
        if usage.get(name, count) not in (count, None):
            raise CaptureError(f"the engine's usage says {usage[name]} {name}, its ids are {count}")


class _Entries(NamedTuple):
    """The log-probs of an answer, and whether they may be those of its ids."""

    logprobs: Any
    of_these: bool


def _generation(
    answer: Json, ids: list[int], entries: _Entries, stop: tuple[str, ...], version: int, limit: int | None = None
) -> Generation:
    choice = _choice(answer)
    said = choice.get("finish_reason")
    finish = finish_reason(said)
    if said == "tool_calls" and len(ids) == limit:
        finish = FinishReason.LENGTH  # a call that was cut reads as a call
    stop_reason = choice.get("stop_reason")
    spans = covering(_spans(choice.get("weight_versions"), len(ids), version), len(ids))
    logprobs = finite(entries.logprobs, len(ids), confirmed=_confirmed(answer, choice))
    if not entries.of_these and ids:
        logprobs = None
    return Generation(ids, logprobs, finish, spans, stop_reason if stop_reason in stop else None)


def _confirmed(answer: Json, choice: Json) -> bool:
    """Whether the number of ids is said apart from the ids. That it is the same has been checked."""
    usage = answer.get("usage") or {}
    return usage.get("completion_tokens") is not None or bool(choice.get("weight_versions"))


def end_of(answer: Any) -> Any:
    """Why the engine ended, in its own word."""
    return _choice(answer).get("finish_reason")


def _spans(versions: Any, length: int, registered: int) -> Iterator[VersionSpan]:
    """vLLM's `weight_versions`, whose names are free text. What is not a number is the version that was registered."""
    if not versions:
        yield VersionSpan(registered, length)
        return
    position = 0
    for span in versions:
        if span["start"] != position:
            raise CaptureError(f"the engine's weight_versions {versions} leave out tokens")
        name, position = str(span["version"]), span["end"]
        version = int(name) if name.isascii() and name.isdecimal() else registered
        yield VersionSpan(version, position - span["start"])


def _column(choice: Json, name: str) -> list[Any] | None:
    """One value of each log-prob entry of GENERATE and CHAT, None where an entry has none."""
    content = (choice.get("logprobs") or {}).get("content")
    if not isinstance(content, list):
        return None
    return [entry.get(name) if isinstance(entry, dict) else None for entry in content]


def _token_logprobs(choice: Json, ids: list[int]) -> _Entries:
    """Log-probs of COMPLETIONS."""
    logprobs = choice.get("logprobs") or {}
    return _Entries(logprobs.get("token_logprobs"), of_these=_may_be(logprobs.get("tokens"), ids))


def _may_be(tokens: list[Any] | None, ids: list[int]) -> bool:
    """Whether the tokens of log-prob entries may be those of `ids`: where they are spelt as ids, they are the same."""
    if not tokens or tokens == [f"{_SPELT}{i}" for i in ids]:
        return True
    return not any(isinstance(token, str) and token.startswith(_SPELT) for token in tokens)


def _completion_ids(choice: Json) -> Any:
    """`token_ids`, or where there are none, the ids that are spelt out in the log-probs."""
    ids = choice.get("token_ids")
    return _spelt((choice.get("logprobs") or {}).get("tokens")) if ids is None else ids


def _spelt(tokens: Any) -> list[int] | None:
    """The ids of `["token_id:12", ...]`; None for anything else."""
    if not isinstance(tokens, list) or not all(isinstance(t, str) and t.startswith(_SPELT) for t in tokens):
        return None
    digits = [token.removeprefix(_SPELT) for token in tokens]
    return [int(d) for d in digits] if all(d.isascii() and d.isdecimal() for d in digits) else None


def _reply(message: Any) -> Json:
    """An assistant message in Leyden's shape, from OpenAI's. Reasoning has one of two names."""
    if not isinstance(message, dict):
        raise CaptureError("the engine's answer has no message")
    content = message.get("content") or ""
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    if not isinstance(content, str) or not isinstance(reasoning, str):
        raise CaptureError("the engine's answer has a message whose content or reasoning is no text")
    reply: Json = {"role": "assistant", "content": content}
    if reasoning:
        reply["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        reply["tool_calls"] = [_call(call) for call in calls]
    return reply


def _call(call: Json) -> Json:
    function = call["function"]
    arguments = arguments_of(function.get("arguments") or "")
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}
