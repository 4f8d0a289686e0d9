"""The msgpack messages to and from the processes that check grammars."""

from typing import NamedTuple

import msgspec

from jaxserve.sampling_params import StructuredOutputs
from jaxserve.structured.grammar import JsonOptions


class AnswerJob(msgspec.Struct, frozen=True, tag="answer"):
    """Make the grammar text of a constraint."""

    constraint: StructuredOutputs
    is_closed: bool
    is_strict: bool
    param: str


class Parameters(NamedTuple):
    """A schema of a tool's parameters: the request's field, the text, and if all of it has to be followed."""

    param: str
    schema: str
    is_strict: bool


class ArgumentsJob(msgspec.Struct, frozen=True, tag="arguments"):
    """Make the schemas of calls' arguments from the parameters of tools."""

    schemas: list[Parameters]
    options: JsonOptions

    @property
    def param(self) -> str:
        """The field to blame if it is not known which one is at fault."""
        return self.schemas[0].param if len(self.schemas) == 1 else "tools"


Job = AnswerJob | ArgumentsJob


class Made(msgspec.Struct, frozen=True, tag="made"):
    """A result: the grammar text, or a list of schemas as JSON. `left_out` is what could not be followed and did not
    have to be: keywords with their fields and paths.
    """

    text: str
    left_out: list[str] = []


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """An error of the caller, to become an InvalidRequest."""

    message: str
    param: str
    code: str | None


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """An error of our own, with its traceback."""

    traceback: str


Result = Made | Refused | Broken
