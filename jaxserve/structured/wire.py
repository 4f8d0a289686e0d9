"""The msgpack messages to and from the processes that check grammars."""

import msgspec

from jaxserve.request import StructuredOutputs
from jaxserve.structured.grammar import JsonOptions


class AnswerJob(msgspec.Struct, frozen=True, tag="answer"):
    """Make the grammar text of a constraint."""

    constraint: StructuredOutputs
    is_closed: bool
    param: str


class ArgumentsJob(msgspec.Struct, frozen=True, tag="arguments"):
    """Make the schemas of calls' arguments from the parameters of tools, given as field names and schema texts."""

    schemas: list[tuple[str, str]]
    options: JsonOptions

    @property
    def param(self) -> str:
        """The field to blame if it is not known which one is at fault."""
        return self.schemas[0][0] if len(self.schemas) == 1 else "tools"


Job = AnswerJob | ArgumentsJob


class Made(msgspec.Struct, frozen=True, tag="made"):
    """A result: the grammar text, or a list of schemas as JSON."""

    text: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """An error of the caller, to become an InvalidRequest."""

    message: str
    param: str
    code: str | None


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """An error of our own, with its traceback."""

    traceback: str


Result = Made | Refused | Broken
