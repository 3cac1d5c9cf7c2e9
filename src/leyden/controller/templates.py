"""Jinja templates of the run file, over values that strangers wrote: sandboxed, strict, bounded in time and size.

The operator writes a template, a stranger the values in it. So nothing may be there that makes much of little at a
value's wish: filters and methods are those of a list, and what can grow is counted before it is made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, UndefinedError, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from leyden.errors import LaunchError

MOST_CHARS = 1 << 20
MOST_RANGE = 1000
MOST_ROUNDS = 1_000_000
MOST_DIGITS = 15
ROUNDS = "_rounds"
FILTERS = frozenset({
    "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby", "int",
    "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "safe",
    "select", "selectattr", "sort", "string", "striptags", "sum", "title", "trim", "truncate", "unique", "upper",
    "urlencode", "wordcount",
})  # fmt: skip
TEXT_METHODS = frozenset({
    "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal",
    "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "join",
    "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition",
    "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper",
})  # fmt: skip
DEEPEST_LOOP = 2


def render(name: str, text: str, known: Mapping[str, Any]) -> str:
    """One template of the run file, called `name` in errors. Raises LaunchError."""
    try:
        return render_strictly(name, text, known)
    except UndefinedError as error:
        raise LaunchError(f"{name}: {error.message}; known are {', '.join(sorted(known))}", final=True) from None


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
        raise LaunchError(f"{name}: {said} {{{{ '{{{{' }}}} or {{{{ '{{%' }}}}", final=True) from None
    except (TemplateError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise LaunchError(f"{name}: the template {text[:200]!r} cannot be rendered: {error}", final=True) from None
    except (RecursionError, MemoryError) as error:
        raise LaunchError(f"{name}: the template {text[:200]!r} needs too much: {error!r}", final=True) from None


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
    tree = sandbox.parse(text)
    _check_loops(tree)
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Filter(loop.iter, ROUNDS, [], [], None, None, lineno=loop.lineno)
    template: Template = sandbox.template_class.from_code(sandbox, sandbox.compile(tree), dict(sandbox.globals))
    return template


class _Sandbox(ImmutableSandboxedEnvironment):
    """No access to Python's insides; products and paddings that could fill the memory are refused."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if not all(isinstance(v, int | float) for v in (left, right)) or (operator == "**" and abs(right) > 64):
            raise TemplateError(f"{operator} is only for small numbers")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in TEXT_METHODS
        return not isinstance(obj, int | float | bytes) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        if getattr(value, "__name__", "") in ("format", "format_map") and isinstance(value.__self__, str):
            raise TemplateError("the method format is refused")

    def call(self, context: Context, obj: Any, /, *args: Any, **more: Any) -> Any:
        text = getattr(obj, "__self__", None)
        if isinstance(text, str) and obj.__name__ == "replace":
            return _replace(text, *args, **more)
        if isinstance(text, str) and obj.__name__ == "join":
            (values,) = args
            return _join(values, text)
        return super().call(context, obj, *args, **more)


def _sandbox() -> _Sandbox:
    sandbox = _Sandbox(undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True)
    sandbox.globals = {"range": _short_range}
    sandbox.filters = {name: made for name, made in sandbox.filters.items() if name in FILTERS}
    sandbox.filters |= {"replace": _replace, "join": _join, "tojson": _tojson, "round": _round, ROUNDS: _counted}
    return sandbox


def _fits(size: int, what: str) -> None:
    if size > MOST_CHARS:
        raise TemplateError(f"{what} would make {size} characters; at most {MOST_CHARS}")


def _replace(text: object, old: str, new: str, count: int = -1) -> str:
    whole = str(text)
    found = whole.count(old) if count is None or count < 0 else min(count, whole.count(old))
    _fits(len(whole) + found * max(0, len(new) - len(old)), "replace")
    return whole.replace(old, new, found)


def _join(values: Iterable[Any], between: str = "", attribute: str | None = None) -> str:
    named = ((v[attribute] if attribute is not None else v) for v in values)
    texts, size = [], 0
    for value in named:
        texts.append(str(value))
        size += len(texts[-1]) + len(between)
        _fits(size - len(between), "join")
    return between.join(texts)


def _tojson(value: Any, indent: int | None = None) -> str:
    if indent is not None and not 0 <= indent <= MOST_DIGITS:
        raise TemplateError(f"tojson with an indent of {indent}; at most {MOST_DIGITS}")
    parts, size = [], 0
    for part in json.JSONEncoder(indent=indent, sort_keys=True).iterencode(value):
        size += len(part)
        _fits(size, "tojson")
        parts.append(part)
    return "".join(parts)


def _round(value: float, precision: int = 0) -> float:
    if abs(precision) > MOST_DIGITS:
        raise TemplateError(f"round to {precision} digits; at most {MOST_DIGITS}")
    return round(value, precision)


@pass_context
def _counted(context: Context, values: Iterable[Any]) -> list[Any]:
    """What a loop goes through: MOST_ROUNDS in all loops of a template together."""
    spent: list[int] = context[ROUNDS]
    taken = list(islice(values, MOST_ROUNDS + 1))
    spent[0] += len(taken)
    if spent[0] > MOST_ROUNDS:
        raise TemplateError(f"loops of more than {MOST_ROUNDS} rounds")
    return taken


def _short_range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > MOST_RANGE:
        raise TemplateError(f"range of {len(numbers)} numbers; at most {MOST_RANGE}")
    return numbers


def _check_loops(tree: nodes.Template) -> None:
    """What repeats is counted: loops to a depth, nothing that calls itself."""
    if _loop_depth(tree) > DEEPEST_LOOP:
        raise TemplateError(f"loops are nested deeper than {DEEPEST_LOOP}")
    if any(tree.find_all((nodes.AssignBlock, nodes.FilterBlock))):
        raise TemplateError("blocks of set and filter are refused; give the expression itself")
    if any(tree.find_all((nodes.Macro, nodes.CallBlock))) or any(f.recursive for f in tree.find_all(nodes.For)):
        raise TemplateError("macros, calls and recursive loops are refused")


def _loop_depth(node: nodes.Node) -> int:
    inner = max(map(_loop_depth, node.iter_child_nodes()), default=0)
    return inner + isinstance(node, nodes.For)


def _bounded(template: Template, known: Mapping[str, Any]) -> str:
    parts, size = [], 0
    for part in template.generate({**known, ROUNDS: [0]}):
        size += len(part)
        if size > MOST_CHARS:
            raise TemplateError(f"the text is longer than {MOST_CHARS} characters")
        parts.append(part)
    return "".join(parts)
