"""Jinja templates of the run file, over values that strangers wrote: sandboxed, strict, bounded in time and size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, UndefinedError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from leyden.errors import LaunchError

MOST_CHARS = 1 << 20
MOST_RANGE = 1000
DEEPEST_LOOP = 2


def render(name: str, text: str, known: Mapping[str, Any]) -> str:
    """One template of the run file, called `name` in errors. Raises LaunchError."""
    try:
        return render_strictly(name, text, known)
    except UndefinedError as error:
        raise LaunchError(f"{name}: {error.message}; known are {', '.join(sorted(known))}") from None


def render_strictly(
    name: str,
    text: str,
    known: Mapping[str, Any],
    finalize: Callable[[Any], Any] | None = None,
    filters: Mapping[str, Callable[..., Any]] | None = None,
) -> str:
    """The same, but a name that is not known raises jinja2's UndefinedError. `finalize` sees each value printed."""
    try:
        template = _compiled(text, finalize, filters) if finalize or filters else _compiled_once(text)
        return _bounded(template, known)
    except UndefinedError:
        raise
    except TemplateSyntaxError as error:
        said = f"the template {text[:200]!r} cannot be rendered: {error}; for braces that are meant as they stand write"
        raise LaunchError(f"{name}: {said} {{{{ '{{{{' }}}} or {{{{ '{{%' }}}}") from None
    except (TemplateError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
        raise LaunchError(f"{name}: the template {text[:200]!r} cannot be rendered: {error}") from None


@lru_cache(maxsize=256)
def _compiled_once(text: str) -> Template:
    """The run file's own templates are the same for every attempt."""
    return _compiled(text, None, None)


def _compiled(
    text: str, finalize: Callable[[Any], Any] | None, filters: Mapping[str, Callable[..., Any]] | None
) -> Template:
    sandbox = _sandbox()
    sandbox.finalize = finalize
    if finalize is None:  # a shell's ${#name} and awk's {# are text: only a file's template has comments
        sandbox.comment_start_string, sandbox.comment_end_string = "\0{#", "#}\0"
    sandbox.filters.update(filters or {})
    _check_loops(sandbox.parse(text))
    template: Template = sandbox.from_string(text)
    return template


class _Sandbox(ImmutableSandboxedEnvironment):
    """No access to Python's insides; products and paddings that could fill the memory are refused."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if not all(isinstance(v, int | float) for v in (left, right)) or (operator == "**" and abs(right) > 64):
            raise TemplateError(f"{operator} is only for small numbers")
        return super().call_binop(context, operator, left, right)


def _sandbox() -> _Sandbox:
    sandbox = _Sandbox(undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True)
    sandbox.globals = {"range": _short_range}
    for name in ("center", "format", "indent", "wordwrap", "pprint"):
        del sandbox.filters[name]
    return sandbox


def _short_range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > MOST_RANGE:
        raise TemplateError(f"range of {len(numbers)} numbers; at most {MOST_RANGE}")
    return numbers


def _check_loops(tree: nodes.Template) -> None:
    """What repeats is counted: loops to a depth, nothing that calls itself."""
    if _loop_depth(tree) > DEEPEST_LOOP:
        raise TemplateError(f"loops are nested deeper than {DEEPEST_LOOP}")
    if any(tree.find_all((nodes.Macro, nodes.CallBlock))) or any(f.recursive for f in tree.find_all(nodes.For)):
        raise TemplateError("macros, calls and recursive loops are refused")


def _loop_depth(node: nodes.Node) -> int:
    inner = max(map(_loop_depth, node.iter_child_nodes()), default=0)
    return inner + isinstance(node, nodes.For)


def _bounded(template: Template, known: Mapping[str, Any]) -> str:
    parts, size = [], 0
    for part in template.generate(known):
        size += len(part)
        if size > MOST_CHARS:
            raise TemplateError(f"the text is longer than {MOST_CHARS} characters")
        parts.append(part)
    return "".join(parts)
