"""Constraints on the answer: OpenAI's `response_format` and vLLM's `structured_outputs`, as StructuredOutputs."""

from typing import Any

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.sampling_params import StructuredOutputs
from jaxserve.structured.grammar import JsonOptions, json_options


class JsonSchema(msgspec.Struct, kw_only=True):
    """A schema, with a name and description for the reader. With `strict` false it is followed as far as a grammar
    can; else all of it is, or the request is refused.
    """

    name: str | None = None
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`type` is text, json_object, json_schema or structural_tag, vLLM's, with a `format` or its earlier fields.

    `schema` is llama.cpp's field for a schema, with either of these types; `name`, `description` and `strict` are those
    of /v1/responses. Unknown fields are errors, as they may be constraints.
    """

    type: str
    json_schema: JsonSchema | None = None
    schema: Any = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    @property
    def structural_tag(self) -> dict[str, Any]:
        """The fields of a structural tag."""
        names = ("format", "structures", "triggers")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def is_strict(self) -> bool:
        """False if what no grammar can follow may be left out of the schema."""
        return self.strict is not False and (self.json_schema is None or self.json_schema.strict is not False)


class StructuredOutputsBody(msgspec.Struct, kw_only=True):
    """One of the first six fields, and options that apply to `response_format` and tools too; see
    StructuredOutputs.
    """

    json: str | dict[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_additional_properties: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None

    @property
    def constraint(self) -> dict[str, Any]:
        """Those of the first six fields that are set."""
        names = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
        fields = {name: getattr(self, name) for name in names}
        return {name: value for name, value in fields.items() if value is not None and (name, value) != _NOT_WISHED}

    @property
    def options(self) -> dict[str, Any]:
        """The options for writing JSON, as fields of StructuredOutputs."""
        names = ("disable_additional_properties", "disable_any_whitespace", "whitespace_pattern")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


_NOT_WISHED = ("json_object", False)


def structured_outputs(
    response_format: ResponseFormat | None, body: StructuredOutputsBody | None
) -> StructuredOutputs | None:
    """Return the constraint of a request, or None. Raises InvalidRequest, naming the field."""
    constraint = {} if response_format is None else _of_format(response_format)
    if body is None:
        return StructuredOutputs(**constraint) if constraint else None
    if constraint and body.constraint:
        raise InvalidRequest("response_format and structured_outputs exclude each other", param="structured_outputs")
    constraint = constraint or body.constraint
    return StructuredOutputs(**constraint, **body.options) if constraint or not body.options else None


def arguments_options(body: StructuredOutputsBody | None, *, is_closed: bool) -> JsonOptions:
    """Return the JSON options for arguments of calls; `is_closed` is the default if the request does not say.

    Raises InvalidRequest, naming the field.
    """
    options = {} if body is None else body.options
    return json_options(StructuredOutputs(json_object=True, **options), is_closed=is_closed)


def _of_format(response_format: ResponseFormat) -> dict[str, Any]:
    """Return the constraint as fields of StructuredOutputs."""
    schema = response_format.schema
    if schema is None and response_format.json_schema is not None:
        schema = response_format.json_schema.schema
    param = _schema_field(response_format)
    tag = response_format.structural_tag
    if tag and response_format.type != "structural_tag":
        raise InvalidRequest(
            f"response_format.{min(tag)} needs the type 'structural_tag'", param=f"response_format.{min(tag)}"
        )
    match response_format.type:
        case "structural_tag" if schema is None:
            if not tag:
                raise InvalidRequest("response_format needs format", param="response_format")
            return {"structural_tag": tag}
        case "text" if schema is None:
            return {}
        case "text":
            raise InvalidRequest(f"{param} contradicts the type 'text'", param=param)
        case "json_object" if schema is None:
            return {"json_object": True}
        case "json_object" | "json_schema":
            if schema is None:
                raise InvalidRequest(f"{param} is required", param=param)
            if not isinstance(schema, dict | bool):
                raise InvalidRequest(f"{param} must be an object", param=param)
            return {"json": schema}
        case other:
            raise InvalidRequest(
                f"response_format of type {other[:40]!r} is not supported",
                param="response_format",
                code="unsupported_parameter",
            )


def _schema_field(response_format: ResponseFormat) -> str:
    return f"response_format.{'json_schema.schema' if response_format.schema is None else 'schema'}"


def constraint_field(response_format: ResponseFormat | None, body: StructuredOutputsBody | None) -> str | None:
    """Return the field with a constraint, None if there is none."""
    if response_format is not None and response_format.type != "text":
        has_schema = response_format.schema is not None or response_format.json_schema is not None
        is_plain = response_format.type in ("json_object", "structural_tag") and not has_schema
        return "response_format" if is_plain else _schema_field(response_format)
    return None if body is None or not body.constraint else "structured_outputs"


_MADE_OF_OTHER_FIELDS = (
    "structured_outputs",
    *(f"structured_outputs.{name}" for name in ("json", "json_object", "structural_tag")),
)


def blame(error: InvalidRequest, field: str | None) -> None:
    """Rename an error about a grammar to the `field` that the client has sent, from which the grammar was made."""
    if field in (None, "structured_outputs") or error.param not in _MADE_OF_OTHER_FIELDS:
        return
    if error.param == "structured_outputs" and error.code != "unsupported_grammar":
        return  # the error is about the field itself
    error.message = error.message.replace(error.param or "", field, 1)
    error.args = (error.message,)
    error.param = field
