"""Renders a model's chat template: jinja in its immutable sandbox, with what templates of Hugging Face models expect.

The reference is transformers' `apply_chat_template`, which takes seconds to import.
"""

import contextlib
import dataclasses
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning, by precedence. Templates read the first, those of GPT-OSS the second."""

_PROBE = "a quokka"
"""Text by which it is found out what a template shows."""

_CUT = "CUT_THE_TEXT_HERE "  # marks the end of the message to be continued; ends in a space that a template may strip


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any],
) -> str:
    """Return the text of a chat. Raises whatever a template raises: it is a program."""
    if add_generation_prompt and continue_final_message:
        raise ValueError("add_generation_prompt and continue_final_message exclude each other")
    chat = [_with_reasoning(_plain({k: v for k, v in message.items() if v is not None})) for message in messages]
    final = _mark_final_message(chat[-1], template) if continue_final_message else ""
    given = {"documents": None, **variables}
    if not _are_documents(given["documents"]):
        raise ValueError("documents must be a list of objects with title and text")
    text = _compiled(template).render(
        **_plain({**given, "tools": tools}), messages=chat, add_generation_prompt=add_generation_prompt
    )
    return _cut(text, final) if continue_final_message else text


def with_parts(template: str, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with each text as a list of one part if the template shows no other: those of some models
    that read images do not.
    """
    if not _reads_parts_only(template):
        return [dict(message) for message in messages]
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else dict(message)
        for message in messages
    ]


@functools.lru_cache(maxsize=64)
def _reads_parts_only(template: str) -> bool:
    def shows(content: Any) -> bool:
        options = {"tools": None, "add_generation_prompt": False, "continue_final_message": False}
        with contextlib.suppress(Exception):  # a template is a program
            return _PROBE in render(template, [{"role": "user", "content": content}], variables={}, **options)
        return False

    return not shows(_PROBE) and shows([{"type": "text", "text": _PROBE}])


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its reasoning under the names that templates use."""
    reasoning = next((message[name] for name in _REASONING_NAMES if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _mark_final_message(message: dict[str, Any], template: str) -> str:
    """Append the mark to the text of the last message; return the text without it."""
    content = message.get("content")
    if content is None:
        raise ValueError("continue_final_message: the last message has no content to continue")
    if "content" not in template:
        raise ValueError("continue_final_message: the chat template shows no content of messages")
    if not isinstance(content, list | tuple):
        message["content"] = content + _CUT
        return content
    for part in reversed(content):
        if "text" in part:
            text = part["text"]
            part["text"] = text + _CUT
            return text
    raise ValueError("continue_final_message: the last message has no text to continue")


def _cut(text: str, final: str) -> str:
    """Return the chat up to the end of the last message's text."""
    mark = _CUT.strip()
    if mark not in text or final.strip() not in text:
        raise ValueError("continue_final_message: the chat template does not show the whole last message")
    end = text.rindex(mark)
    is_stripped = text[end : end + len(_CUT)] != _CUT
    return text[:end].rstrip() if is_stripped else text[:end]


def _are_documents(documents: Any) -> bool:
    return documents is None or (
        isinstance(documents, list | tuple) and all(isinstance(each, dict) for each in documents)
    )


def _plain(value: Any) -> Any:
    """Return the value as JSON's types: a template must not call methods of a caller's objects."""
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case Mapping():
            return {_plain(key): _plain(item) for key, item in value.items()}
        case list():
            return [_plain(item) for item in value]
        case tuple():
            return tuple(_plain(item) for item in value)
        case np.generic():
            return _plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    dump = getattr(value, "model_dump", None)  # pydantic's
    if callable(dump):
        return _plain(dump())
    return f"<{type(value).__name__}>"


class _Generation(Extension):
    """Renders `{% generation %}`, which marks an assistant's words for training, as its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse up to `{% endgeneration %}`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Any) -> str:
        return caller()


class _SafeNamespace(Namespace):
    """jinja's namespace without names that begin with an underscore, which reach into the interpreter."""

    def __init__(*args: Any, **attributes: Any):  # so that an attribute may be called "self"
        Namespace.__init__(args[0])
        for name, value in dict(*args[1:], **attributes).items():
            args[0][name] = value

    def __setitem__(self, name: str, value: Any):
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a chat template cannot set {name!r} of a namespace")
        Namespace.__setitem__(self, name, value)


class _Dict:
    """The function `dict`, without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return `dict.fromkeys`."""
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON; jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _SafeNamespace,
    }
    return environment.from_string(template)
