"""The model's tokenizer and renderer, tried on one tool call; and the folder's own chat template beside them."""

from __future__ import annotations

from leyden.config import ModelConfig
from leyden.doctor.chat_template import ChatTemplate
from leyden.doctor.findings import Finding, ok, problem, warning
from leyden.errors import RequestError
from leyden.gateway.render import ModelRenderer
from leyden.types import Json

COMMAND = "ls -l 'a b'\ncat *.txt"
RESULT = "total 0\ncafé\n"
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command."}},
            "required": ["command"],
        },
    },
}
ASKED: list[Json] = [
    {"role": "system", "content": "You are a careful assistant."},
    {"role": "user", "content": "Which files are there?"},
]
SHOWN_CHARS = 60


def check_renderer(renderer: ModelRenderer, name: str) -> Finding:
    """A reply that calls a tool, with and without reasoning: sampled, parsed, continued."""
    tried = [(reasoning, *round_trip(renderer, reasoning)) for reasoning in ("", "I look first.")]
    for reasoning, broken, _ in tried:
        if broken:
            what = f"{name}: a tool call {'with' if reasoning else 'without'} reasoning {broken}"
            return problem("renderer", what, "name the model's family in model.renderer, for example qwen3")
    for reasoning, _, differs in tried:
        if differs:
            what = f"{name}: after a tool call {'with' if reasoning else 'without'} reasoning {differs}"
            return warning("renderer", what, "conversations will fork there; `leyden show RUN_DIR --forks` counts it")
    return ok("renderer", f"{name}: a tool call is parsed, and with its result goes on as the template shows it")


def round_trip(renderer: ModelRenderer, reasoning: str) -> tuple[str, str]:
    """What is broken, and what only differs from the template's own rendering; both empty if all is well.

    The reply is sampled as the template shows it when the conversation goes on. Texts are compared: where the prompt
    ends in the middle of what the template writes at once, tokens may well be others.
    """
    function = {"name": "shell", "arguments": {"command": COMMAND}}
    call = {"id": "call_0", "type": "function", "function": function}
    reply: Json = {"role": "assistant", "content": "", "tool_calls": [call]}
    if reasoning:
        reply["reasoning_content"] = reasoning
    result: Json = {"role": "tool", "tool_call_id": "call_0", "name": "shell", "content": RESULT}
    try:
        prompt = renderer.render(ASKED, [TOOL])
        whole = renderer.decode(renderer.render([*ASKED, reply, result], [TOOL]))
    except RequestError as error:
        return f"cannot be rendered: {error}", ""
    before = renderer.decode(prompt)
    if not whole.startswith(before):
        return "", f"the template shows the turns before otherwise: {different(whole, before)}"
    shown = _up_to_stop(renderer, whole.removeprefix(before))
    if not shown:
        return "ends with none of the renderer's stop tokens", ""
    sampled = renderer.encode(shown, add_special_tokens=False)
    parsed = renderer.parse(sampled, prompt, [TOOL], call_prefix="call_", stop_string=None)
    functions = [call["function"] for call in parsed.get("tool_calls", [])]
    if functions != [function]:
        return f"is parsed as {functions or parsed['content']!r}, sampled was {shown!r}", ""
    try:
        bridged = renderer.bridge(prompt, sampled, [result], [TOOL], reasoning=bool(parsed.get("reasoning_content")))
    except RequestError as error:
        return f"cannot be continued: {error}", ""
    if bridged is None:
        return "", "its sampled ids are not continued"
    goes_on = renderer.decode(bridged)
    return "", "" if goes_on == whole else f"the next prompt is not the template's: {different(goes_on, whole)}"


def _up_to_stop(renderer: ModelRenderer, text: str) -> str:
    """`text` up to its first stop token, that included; empty if there is none."""
    stops = [renderer.decode([stop]) for stop in renderer.stop_token_ids]
    ends = [text.index(stop) + len(stop) for stop in stops if stop and stop in text]
    return text[: min(ends, default=0)]


def check_template(model: ModelConfig, renderer: ModelRenderer, template: ChatTemplate) -> Finding:
    """The renderer's text beside that of the folder's template, which a server of the trained model will use."""
    tools = [TOOL] if template.knows_tools else []
    try:
        shown = template.text(ASKED, tools, model.template_kwargs)
    except Exception as error:  # the template is anybody's program
        return warning("template", f"{model.path}: its chat template fails: {type(error).__name__}: {error}")
    rendered = renderer.decode(renderer.render(ASKED, tools))
    if shown != rendered:
        what = f"the model's own chat template is not the renderer's: {different(rendered, shown)}"
        advice = "a server of the trained model must be given the template that is trained with"
        return warning("template", what, advice)
    without = "" if tools else "; it shows no tools"
    return ok("template", f"the model's own chat template gives the renderer's text{without}")


def different(ours: str, theirs: str) -> str:
    """Where two texts part: `at character 12 'ab…', not 'cd…'`."""
    pairs = zip(ours, theirs, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    return f"at character {at} {ours[at : at + SHOWN_CHARS]!r}, not {theirs[at : at + SHOWN_CHARS]!r}"
