"""What goes to the processes that check grammars, and what comes back, as msgpack."""

import msgspec

from jaxserve.request import StructuredOutputs
from jaxserve.structured.grammar import JsonOptions


class AnswerJob(msgspec.Struct, frozen=True, tag="answer"):
    """Make the grammar text of a wish."""

    wish: StructuredOutputs
    is_closed: bool
    param: str


class ArgumentsJob(msgspec.Struct, frozen=True, tag="arguments"):
    """Make the schemas of calls' arguments from the parameters of tools: names of fields, and texts of schemas."""

    schemas: list[tuple[str, str]]
    options: JsonOptions

    @property
    def param(self) -> str:
        """The field to blame where it cannot be told which."""
        return self.schemas[0][0] if len(self.schemas) == 1 else "tools"


Job = AnswerJob | ArgumentsJob


class Made(msgspec.Struct, frozen=True, tag="made"):
    """The grammar text, or a list of schemas as JSON."""

    text: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The caller's fault: an InvalidRequest."""

    message: str
    param: str
    code: str | None


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """Our own fault, with its traceback."""

    traceback: str


Result = Made | Refused | Broken
