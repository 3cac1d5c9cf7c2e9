"""The control API as an OpenAPI description, from the one table of its operations. `docs/openapi.json` is its text."""

from __future__ import annotations

import inspect
import re
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from starlette.responses import Response

import leyden
from leyden.gateway.control_routes import JSON, OPERATIONS, Operation
from leyden.records import adapter
from leyden.types import Json

_REFUSALS = {
    "400": "the body is not JSON, or names something that cannot be",
    "401": "no key, or one that is forged or expired",
    "403": "a key of another scope, or of an attempt that has ended",
    "404": "there is no such thing",
    "409": "the change does not apply any more",
    "413": "the body is too large",
    "415": "the body is compressed in a way that is not read",
    "422": "a field of the body or of the query is wrong",
}
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "code", "param"],
            "properties": {
                "message": {"type": "string"},
                "code": {"type": "string"},
                "param": {"type": ["string", "null"]},
            },
        }
    },
}

BY_HARNESS = "; agent under grader.harness: true"


def document() -> Json:
    """OpenAPI 3.1."""
    bodies = {op.body for op in OPERATIONS if op.body}
    answers = {answer for op in OPERATIONS if (answer := _record(op))}
    described: list[tuple[Any, Literal["validation", "serialization"], TypeAdapter[Any]]]
    described = [(kind, "validation", adapter(kind)) for kind in bodies]
    described += [(kind, "serialization", adapter(kind)) for kind in answers]
    described.sort(key=lambda one: one[0].__name__)
    _, schemas = TypeAdapter.json_schemas(
        described, ref_template="#/components/schemas/{model}", schema_generator=_Schemas
    )
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Leyden's gateway: control API", "version": leyden.__version__},
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": schemas["$defs"] | {"Error": _ERROR},
            "responses": {
                f"Refused{status}": {"description": text, "content": {JSON: {"schema": _ref("schemas", "Error")}}}
                for status, text in _REFUSALS.items()
            },
        },
    }


class _Schemas(GenerateJsonSchema):
    """An answer has every field, also one with a default."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        return self.mode == "serialization" or super().field_is_required(field, total)


def _operation(operation: Operation) -> Json:
    described: Json = {
        "operationId": operation.handler.__name__,
        "description": f"Keys: {', '.join(sorted(operation.scopes))}{BY_HARNESS if operation.by_harness else ''}.",
        "parameters": [*_path_parameters(operation.path), *(_query_parameters(operation.query))],
        "responses": {
            "200": {"description": "done", "content": {operation.answers: {"schema": _answer(operation)}}},
            **{status: _ref("responses", f"Refused{status}") for status in _REFUSALS},
        },
    }
    if said := inspect.getdoc(operation.handler):
        described["summary"] = said.partition("\n\n")[0].replace("\n", " ")
    if operation.body is not None:
        schema = _ref("schemas", operation.body.__name__)
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    elif operation.takes is not None:
        described["requestBody"] = {"required": True, "content": {operation.takes: {"schema": {}}}}
    return described


def _ref(kind: str, name: str) -> Json:
    return {"$ref": f"#/components/{kind}/{name}"}


def _record(operation: Operation) -> type[Any] | None:
    """What a handler answers, if it is no response of its own."""
    answer: type[Any] = get_type_hints(operation.handler)["return"]
    return None if issubclass(answer, Response) else answer


def _answer(operation: Operation) -> Json:
    record = _record(operation)
    return _ref("schemas", record.__name__) if record else {}


def _path_parameters(path: str) -> list[Json]:
    return [_parameter(name, "path", {"type": "string"}, required=True) for name in re.findall(r"{(\w+)}", path)]


def _query_parameters(query: type[BaseModel] | None) -> list[Json]:
    if query is None:
        return []
    schema = query.model_json_schema()
    required = schema.get("required", [])
    return [
        _parameter(name, "query", _as_sent(field), required=name in required)
        for name, field in schema["properties"].items()
    ]


def _as_sent(field: Json) -> Json:
    """The schema of a parameter: a query says nothing by leaving it out, not by null."""
    options = [option for option in field.get("anyOf", ()) if option != {"type": "null"}]
    kept = {name: value for name, value in field.items() if name not in ("anyOf", "title", "default")}
    default = {"default": field["default"]} if field.get("default") is not None else {}
    return kept | (options[0] if options else {}) | default


def _parameter(name: str, place: str, schema: Any, *, required: bool) -> Json:
    return {"name": name, "in": place, "required": required, "schema": schema}
