"""What Leyden does with each field of each protocol: one table, which the docs print and tests walk.

`overridden`: training samples from the run file's distribution; in evaluation the harness's own `temperature`, `top_p`,
`top_k` and `seed` hold. `honoured`: it has its documented effect. Of a tool choice that is what only needs the reply to
be read otherwise (no calls, calls of some tools, one call); that a tool must be called is ignored and counted.
`ignored`: accepted, without effect, counted.
`refused`: a 400 that names it.
A field that is not in the table is ignored and counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from leyden.errors import RequestError


class FieldClass(StrEnum):
    OVERRIDDEN = "overridden"
    HONOURED = "honoured"
    IGNORED = "ignored"
    REFUSED = "refused"


_OPENAI_CHAT: dict[FieldClass, tuple[str, ...]] = {
    FieldClass.OVERRIDDEN: (
        *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("seed", "logprobs", "top_logprobs"),
    ),
    FieldClass.HONOURED: (
        *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "stop", "n", "stream", "stream_options"),
        *("max_tokens", "max_completion_tokens"),
    ),
    FieldClass.IGNORED: (
        *("response_format", "reasoning_effort", "verbosity", "metadata"),
        *("store", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier"),
        *("prediction", "prompt_cache_options", "moderation", "web_search_options", "return_token_ids"),
    ),
    FieldClass.REFUSED: (*("logit_bias", "audio", "modalities", "functions", "function_call", "chat_template"),),
}

_OPENAI_COMPLETIONS: dict[FieldClass, tuple[str, ...]] = {
    FieldClass.OVERRIDDEN: (
        *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("seed", "logprobs"),
    ),
    FieldClass.HONOURED: ("model", "prompt", "max_tokens", "n", "stop", "stream", "stream_options"),
    FieldClass.IGNORED: ("user", "response_format", "return_token_ids"),
    FieldClass.REFUSED: ("logit_bias", "echo", "suffix", "best_of", "add_special_tokens", "prompt_embeds"),
}

_OPENAI_RESPONSES: dict[FieldClass, tuple[str, ...]] = {
    FieldClass.OVERRIDDEN: ("temperature", "top_p", "top_logprobs"),
    FieldClass.HONOURED: (
        *("model", "input", "instructions", "previous_response_id", "tools", "max_output_tokens"),
        *("tool_choice", "parallel_tool_calls", "store", "stream", "include"),
    ),
    FieldClass.IGNORED: (
        *("max_tool_calls", "text", "reasoning", "truncation", "metadata"),
        *("stream_options", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "service_tier"),
        *("user", "safety_identifier", "client_metadata", "context_management", "moderation", "access_programs"),
        *("background_options", "image"),
    ),
    FieldClass.REFUSED: ("background", "conversation", "prompt"),
}

_ANTHROPIC_MESSAGES: dict[FieldClass, tuple[str, ...]] = {
    FieldClass.OVERRIDDEN: ("temperature", "top_p", "top_k"),
    FieldClass.HONOURED: (
        *("model", "system", "messages", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream"),
    ),
    FieldClass.IGNORED: (
        *("thinking", "output_config", "output_format", "context_management", "cache_control"),
        *("metadata", "service_tier", "speed", "inference_geo", "container", "mcp_servers", "betas", "diagnostics"),
        *("fallbacks", "fallback_credit_token", "billing_policy", "user_profile_id", "workspace_id"),
    ),
    FieldClass.REFUSED: ("compaction", "thread"),
}

_GEMINI: dict[FieldClass, tuple[str, ...]] = {
    FieldClass.OVERRIDDEN: (
        *("generationConfig.temperature", "generationConfig.topP", "generationConfig.topK", "generationConfig.seed"),
        *("generationConfig.presencePenalty", "generationConfig.frequencyPenalty"),
        *("generationConfig.responseLogprobs", "generationConfig.logprobs"),
    ),
    FieldClass.HONOURED: (
        *("contents", "systemInstruction", "tools", "toolConfig", "generationConfig", "generateContentRequest"),
        *("generationConfig.maxOutputTokens", "generationConfig.stopSequences", "generationConfig.candidateCount"),
    ),
    FieldClass.IGNORED: (
        *("model", "safetySettings", "labels", "serviceTier", "store", "modelArmorConfig"),
        *("generationOutputConfig", "generationConfig.imageConfig", "generationConfig.audioTranscriptionConfig"),
        *("generationConfig.responseMimeType", "generationConfig.responseSchema", "generationConfig.thinkingConfig"),
        *("generationConfig.responseJsonSchema", "generationConfig.mediaResolution", "generationConfig.speechConfig"),
        *("generationConfig._responseJsonSchema", "generationConfig.enableEnhancedCivicAnswers"),
        *("generationConfig.responseFormat", "generationConfig.enableAffectiveDialog"),
        *("generationConfig.translationConfig",),
        *("generationConfig.routingConfig", "generationConfig.modelSelectionConfig", "generationConfig.audioTimestamp"),
    ),
    FieldClass.REFUSED: ("cachedContent", "continuationToken", "generationConfig.responseModalities"),
}

_TABLES = {
    "openai-chat": _OPENAI_CHAT,
    "openai-completions": _OPENAI_COMPLETIONS,
    "openai-responses": _OPENAI_RESPONSES,
    "anthropic-messages": _ANTHROPIC_MESSAGES,
    "gemini": _GEMINI,
}
FIELDS: dict[str, dict[str, FieldClass]] = {
    protocol: {name: kind for kind, names in table.items() for name in names} for protocol, table in _TABLES.items()
}

_REFUSALS = {
    "logit_bias": "it would change the distribution that is trained; leave it out",
    "audio": "only text can be recorded; leave it out",
    "modalities": 'only text can be recorded; leave it out or send ["text"]',
    "functions": "send `tools` instead",
    "echo": "the reply holds what was sampled, not the prompt; leave it out",
    "suffix": "the model only continues the prompt; leave it out",
    "best_of": "every sampled choice is recorded and answered; send `n` instead",
    "add_special_tokens": "send the prompt as token ids instead",
    "prompt_embeds": "only tokens can be recorded; send `prompt` instead",
    "function_call": "send `tool_choice` instead",
    "background": "a response is made while its caller waits; leave it out",
    "conversation": "no conversations are kept here; send `previous_response_id`, or the whole history as `input`",
    "prompt": "no prompt templates are kept here; send `instructions` and `input`",
    "cachedContent": "nothing is cached here; send the contents themselves",
    "continuationToken": "send the contents with the answer so far",
    "generationConfig.responseModalities": 'only text can be recorded; leave it out or send ["TEXT"]',
    "compaction": "ask for the summary with a message of your own",
    "thread": "send all messages of the conversation",
    "continue_final_message": "a reply is a message of its own; end with a user message or a tool result",
    "add_generation_prompt": "a reply is a message of its own; leave it out",
    "chat_template": "the run's own template shows the messages; leave it out",
}
# Servers of open models take these on routes of OpenAI's and Anthropic's protocols, which do not have them.
EVERYWHERE = {
    "chat_template_kwargs": FieldClass.HONOURED,
    "continue_final_message": FieldClass.REFUSED,
    "add_generation_prompt": FieldClass.REFUSED,
}
_HARMLESS: dict[str, Any] = {
    "modalities": ["text"],
    "generationConfig.responseModalities": ["TEXT"],
    "background": False,
    "echo": False,
    "suffix": "",
    "add_special_tokens": True,
    "continue_final_message": False,
    "add_generation_prompt": True,
}


def check_fields(protocol: str, body: Mapping[str, Any]) -> tuple[str, ...]:
    """Raise RequestError for a refused field that is set; answer the names of the ignored ones that are set."""
    table = FIELDS[protocol]
    ignored = []
    for name, value in body.items():
        kind = EVERYWHERE.get(name) or table.get(name, FieldClass.IGNORED)
        if value is None or value in ({}, []) or (name in _HARMLESS and value == _HARMLESS[name]):
            continue
        if kind is FieldClass.REFUSED:
            raise RequestError(f"{name} is not supported: {_REFUSALS[name]}", param=name, code="unsupported_parameter")
        if kind is FieldClass.IGNORED:
            ignored.append(name)
    return tuple(ignored)
