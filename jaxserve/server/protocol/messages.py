"""Convert the messages of a chat from what clients send to what a chat template reads."""

import re
from collections.abc import Container, Sequence
from typing import Any

import msgspec

from jaxserve.answers.choosing.message_style import MessageStyle
from jaxserve.answers.tools.cut_json import as_object
from jaxserve.answers.tools.definitions import ToolCall
from jaxserve.errors import InvalidRequest
from jaxserve.server.protocol.common import content_not_supported, refuse_unless_empty
from jaxserve.server.protocol.items import Part

MAX_MESSAGES = 4096
USUAL_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Roles that every template is expected to show, or to refuse. It may silently omit others."""
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message's content. Only text parts are supported."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message of the conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    function_call: Any = None
    audio: Any = None
    annotations: Any = None
    """Set in OpenAI's answers, so that it comes back in the next request; ignored."""


def template_messages(
    messages: Sequence[ChatMessage],
    style: MessageStyle,
    *,
    continue_final_message: bool | None,
    add_generation_prompt: bool | None,
) -> list[dict[str, Any]]:
    """Convert messages to what a chat template reads: content as one text, `developer` as `system`.

    Raises InvalidRequest for unsupported parts, roles and combinations.
    """
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(
            f"messages has {len(messages)} entries, at most {MAX_MESSAGES} are allowed", param="messages"
        )
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    return _placed([_template_message(message, style, f"messages[{i}]") for i, message in enumerate(messages)], style)


def _placed(messages: Sequence[dict[str, Any]], style: MessageStyle) -> list[dict[str, Any]]:
    """Return the messages with system messages where the template shows them: several at the beginning become one, and
    later ones are said by the user.
    """
    placed: list[dict[str, Any]] = []
    contents: list[list[Any]] = []  # of each placed message, joined at the end
    joins_user = has_others = False
    for message in messages:
        is_system = message["role"] == "system" and bool(placed)
        is_late = is_system and has_others
        if is_late and not style.shows_late_system:
            message = {"role": "user", "content": message["content"]}
            joins_user = True
        joins = joins_user if message["role"] == "user" else is_system and not is_late and not style.shows_systems
        if joins and placed[-1]["role"] == message["role"]:
            contents[-1].append(message["content"])
        else:
            placed.append(message)
            contents.append([message["content"]])
        joins_user &= message["role"] == "user"
        has_others |= message["role"] != "system"
    return [
        message if len(parts) == 1 else message | {"content": "\n\n".join(parts)}
        for message, parts in zip(placed, contents, strict=True)
    ]


def _template_message(message: ChatMessage, style: MessageStyle, param: str) -> dict[str, Any]:
    if _ROLE.fullmatch(message.role) is None:
        raise InvalidRequest(f"{param}.role must have 1 to 64 letters, digits, dots, _ or -", param=f"{param}.role")
    for name in ("function_call", "audio"):
        refuse_unless_empty(f"{param}.{name}", getattr(message, name))
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(f"{param}.tool_calls: only an assistant calls tools", param=f"{param}.tool_calls")
    has_calls = bool(message.tool_calls)
    if message.content is None and message.role != "assistant":
        raise InvalidRequest(f"{param}.content must not be null", param=f"{param}.content")
    content = _text(message.content, param)
    if not has_calls and message.role == "assistant":  # an answer may consist of thoughts only
        content = content or message.refusal or ""
    reasoning = (message.reasoning_content or message.reasoning) if message.role == "assistant" else None
    if has_calls and (not content or (reasoning and not style.shows_both)):
        content = style.empty_content
    rendered: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name is not None:
        rendered["name"] = message.name
    if message.role == "tool":
        if message.tool_call_id is None:
            raise InvalidRequest(f"{param}.tool_call_id is missing", param=f"{param}.tool_call_id")
        rendered["tool_call_id"] = message.tool_call_id
    if reasoning:
        rendered["reasoning_content"] = reasoning  # rendering adds the other names that templates use for it
    if message.tool_calls:
        rendered["tool_calls"] = [_template_call(call, style) for call in message.tool_calls]
    return rendered


def _template_call(call: ToolCall, style: MessageStyle) -> dict[str, Any]:
    function = call.as_function
    given = function.arguments
    arguments = given if style.arguments_are_text else as_object(given)
    return {"id": call.id, "type": "function", "function": {"name": function.name, "arguments": arguments}}


def check_unusual_roles(messages: Sequence[dict[str, Any]], text: str) -> None:
    """Raise InvalidRequest, naming the message, if one of an unusual role is missing from the rendered `text`."""
    for i, message in enumerate(messages):
        content = (message["content"] or "").strip()
        if message["role"] not in USUAL_ROLES and content not in text:
            param = f"messages[{i}].role"
            raise InvalidRequest(f"{param}: this model's chat template does not show {message['role']!r}", param=param)


class Turn:
    """The thoughts, text and calls of the assistant since the last item of another role."""

    def __init__(self) -> None:
        self.thoughts: list[str] = []
        self.words: list[str] = []
        self.calls: list[dict[str, Any]] = []

    @property
    def is_only_words(self) -> bool:
        """True if further text would be another message."""
        return bool(self.words) and not self.thoughts and not self.calls

    def close(self) -> list[dict[str, Any]]:
        """Return the message of the turn, if there is one, and begin the next turn."""
        thoughts, words, calls = self.thoughts, self.words, self.calls
        self.thoughts, self.words, self.calls = [], [], []
        if not (thoughts or words or calls):
            return []
        message: dict[str, Any] = {"role": "assistant", "content": _on_lines(words) or (None if calls else "")}
        if "".join(thoughts):
            message["reasoning_content"] = "\n".join(thoughts)
        return [message | ({"tool_calls": calls} if calls else {})]


def _on_lines(words: Sequence[str]) -> str:
    """Join texts so that each begins on a line of its own."""
    *earlier, last = [text for text in words if text] or [""]
    return "".join(text if text.endswith("\n") else f"{text}\n" for text in earlier) + last


def last_content(messages: Sequence[ChatMessage]) -> str:
    """Return the content of the last message, as the template reads it."""
    return _text(messages[-1].content, f"messages[{len(messages) - 1}]") or ""


def _text(content: str | list[ContentPart] | None, param: str) -> str | None:
    return join_parts(content, f"{param}.content", ("text", "refusal")) if isinstance(content, list) else content


def join_parts(parts: Sequence[ContentPart | Part], param: str, kinds: Container[str]) -> str:
    """Return the text of the parts in the field `param`. Raises InvalidRequest for one that is not of these kinds."""
    texts = []
    for index, part in enumerate(parts):
        if part.type not in kinds:
            raise content_not_supported(f"{param}[{index}].type", part.type)
        name = "refusal" if part.type == "refusal" else "text"
        text: str | None = getattr(part, name)
        if text is None:
            raise InvalidRequest(f"{param}[{index}].{name} is missing", param=f"{param}[{index}].{name}")
        texts.append(text)
    return "\n".join(texts)
