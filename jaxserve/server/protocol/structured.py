"""What form the answer must have: OpenAI's `response_format`, and vLLM's `structured_outputs`, as StructuredOutputs."""

from typing import Any

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.request import StructuredOutputs


class JsonSchema(msgspec.Struct, kw_only=True):
    """A schema, whose name and description are for the reader; it is followed whatever `strict` says."""

    name: str | None = None
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """`type` is text, json_object or json_schema."""

    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputsBody(msgspec.Struct, kw_only=True):
    """One of these; see StructuredOutputs."""

    json: str | dict[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


def structured_outputs(
    response_format: ResponseFormat | None, body: StructuredOutputsBody | None
) -> StructuredOutputs | None:
    """The wish of a request, if it has one. Raises InvalidRequest, naming the field."""
    wish = None if response_format is None else _of_format(response_format)
    if body is None:
        return wish
    if wish is not None:
        raise InvalidRequest("response_format and structured_outputs exclude each other", param="structured_outputs")
    return StructuredOutputs(
        json=body.json,
        json_object=bool(body.json_object),
        regex=body.regex,
        choice=body.choice,
        grammar=body.grammar,
    )


def _of_format(response_format: ResponseFormat) -> StructuredOutputs | None:
    match response_format.type:
        case "text":
            return None
        case "json_object":
            return StructuredOutputs(json_object=True)
        case "json_schema":
            if response_format.json_schema is None or response_format.json_schema.schema is None:
                param = "response_format.json_schema.schema"
                raise InvalidRequest(f"{param} is required", param=param)
            schema = response_format.json_schema.schema
            if not isinstance(schema, dict | bool):
                param = "response_format.json_schema.schema"
                raise InvalidRequest(f"{param} must be an object", param=param)
            return StructuredOutputs(json=schema)
        case other:
            raise InvalidRequest(
                f"response_format of type {other[:40]!r} is not supported",
                param="response_format",
                code="unsupported_parameter",
            )


def wish_field(response_format: ResponseFormat | None, body: StructuredOutputsBody | None) -> str | None:
    """The field that has a wish, None if none has."""
    if body is not None:
        return "structured_outputs"
    if response_format is None or response_format.type == "text":
        return None
    return "response_format" + (".json_schema.schema" if response_format.type == "json_schema" else "")


def blame(error: InvalidRequest, field: str | None) -> None:
    """Name the `field` that the client has sent, where an error is about the grammar that was made of it."""
    if field in (None, "structured_outputs") or not (error.param or "").startswith("structured_outputs"):
        return
    error.message = error.message.replace(error.param or "", field, 1)
    error.args = (error.message,)
    error.param = field
