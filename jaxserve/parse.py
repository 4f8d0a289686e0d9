"""`jaxserve parse`: print an answer's text as the message that the API would return, to debug calls that are not
parsed.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, override

import msgspec

from jaxserve.answers.choosing.choice import Choice, choose
from jaxserve.answers.choosing.served_tokenizer import served_tokenizer
from jaxserve.answers.message import AssistantMessage
from jaxserve.answers.parsing.readers import reader_of
from jaxserve.answers.syntaxes.syntax import Ids, Syntax
from jaxserve.answers.tools.definitions import ToolDefinition, callable_tools
from jaxserve.answers.writer import message_of
from jaxserve.config import ServerConfig
from jaxserve.decoding import decoded
from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.loading.builtin import resolve_model
from jaxserve.tokenizer import Tokenizer


class AnyTool(Mapping[str, dict[str, Any]]):
    """A mapping that contains a tool of any name, with any arguments, for when the tools are not known."""

    @override
    def __getitem__(self, name: str) -> dict[str, Any]:
        return {}

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(("any",))

    @override
    def __len__(self) -> int:
        return 1


def read_tools(file: str) -> dict[str, dict[str, Any]]:
    """Return the schemas of the tools in a JSON file by name: a list as in requests. Raises ConfigError."""
    try:
        tools = decoded(Path(file).read_bytes(), list[ToolDefinition], what="the file")
    except (OSError, InvalidRequest) as error:
        raise ConfigError(f"cannot read tools from {file}: {error}") from error
    return {tool.name: tool.parameters for tool in callable_tools(tools, None)}


def parse(
    text: str,
    syntax: Syntax,
    *,
    tools: Mapping[str, Mapping[str, Any]] | None = None,
    chunk: int | None = None,
    prompt_end: str = "",
) -> AssistantMessage:
    """Return the message that an answer is parsed as.

    `tools` are the schemas of the offered tools, by name; None allows any. `chunk` is the number of characters that are
    parsed at once, None for all. `prompt_end` is the end of the prompt, which may have begun thoughts. Raises
    ConfigError.
    """
    if chunk is not None and chunk < 1:
        raise ConfigError(f"chunk must be at least 1, not {chunk}")
    thoughts = syntax.thoughts
    is_open = None if thoughts is None else thoughts.are_open(prompt_end)
    if is_open is None:
        is_open = thoughts is not None and thoughts.starts_open
    reader = reader_of(syntax, AnyTool() if tools is None else tools, is_open=is_open)
    size = chunk or max(1, len(text))
    events = [event for start in range(0, len(text), size) for event in reader.push(text[start : start + size])]
    ids = Ids.ANY if syntax.calls is None else syntax.calls.ids
    return message_of([*events, *reader.finish()], lambda start, number: ids.make(start.name, number, own=start.id))


def not_offered(text: str, syntax: Syntax, tools: Mapping[str, Any], *, prompt_end: str = "") -> list[str]:
    """Return the names of tools that an answer calls although they are not offered."""
    calls = parse(text, syntax, prompt_end=prompt_end).tool_calls or []
    return list(dict.fromkeys(name for name in (call.as_function.name for call in calls) if name not in tools))


def choose_syntax(model: str | None, config: ServerConfig, *, revision: str | None = None) -> Choice:
    """Choose the syntax of an answer as the server would. Raises ConfigError if it is not known, CheckpointError."""
    tokenizer = None
    if model is not None:
        path = resolve_model(model, revision=revision, with_weights=False)
        tokenizer = served_tokenizer(Tokenizer.load(path), config)
    elif config.chat_template is not None:
        raise ConfigError("chat_template needs a model, whose tokens it has")
    choice = choose(tokenizer, tool_call_parser=config.tool_call_parser, reasoning_parser=config.reasoning_parser)
    if choice.syntax == Syntax() and model is None:
        raise ConfigError("nothing says how to read the answer: name a model, tool_call_parser or reasoning_parser")
    return choice


def as_json(message: AssistantMessage) -> str:
    """Return a message as the API shows it, indented for reading."""
    return msgspec.json.format(msgspec.json.encode(message), indent=2).decode()
