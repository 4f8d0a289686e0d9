"""Find out how a chat template expects the calls of earlier turns and system messages: templates differ, and some fail
or leave out a message if it is wrong.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.answers.tools.cut_json import as_object
from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.tokenizer import Tokenizer


class MessageStyle(NamedTuple):
    """What a template expects of messages; see `message_style`.

    `arguments_are_text`: the arguments of a call are JSON text, not the object itself. `empty_content` represents
    absent content. `shows_both`: a message with a call may have both content and reasoning. `shows_systems`: several
    system messages may begin a conversation; `shows_late_system`: one may come later.
    """

    arguments_are_text: bool = False
    empty_content: str | None = ""
    shows_both: bool = True
    shows_systems: bool = True
    shows_late_system: bool = True


# The most common first: arguments as an object, and an empty text as content.
_STYLES = tuple(MessageStyle(are_text, empty) for are_text in (False, True) for empty in ("", None))


def message_style(tokenizer: Tokenizer) -> MessageStyle:
    """Return the first style in which the model's template shows a call with its argument, else the most common one."""
    style = next((style for style in _STYLES if _shows_call(_render(tokenizer, style))), _STYLES[0])
    fails = _render(tokenizer, style) and not _render(tokenizer, style, content="Wait.", reasoning="Hm.")
    system, late = _message("system", "Be wombat."), _message("system", "Be quokka.")
    user, answer = _message("user", "Hello."), _message("assistant", "Yes?")

    def shows_both(*messages: Mapping[str, Any]) -> bool:
        text = _rendered(tokenizer, *messages)
        return "wombat" in text and "quokka" in text

    return style._replace(
        shows_both=not fails,
        shows_systems=shows_both(system, late, user),
        shows_late_system=shows_both(system, user, answer, late, user),
    )


def as_template_reads(
    messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, *, chat_template: str | None = None
) -> list[dict[str, Any]]:
    """Return messages, as the Python API takes them, as the template reads them: content in parts becomes one text, and
    the arguments of calls are the object or its JSON.

    `chat_template` is read in place of the model's. Raises InvalidRequest, naming the message, for a part that is no
    text.
    """
    are_text = False
    if any(message.get("tool_calls") for message in messages):
        with contextlib.suppress(ConfigError):  # rendering says what is wrong with the template
            read = tokenizer if chat_template is None else tokenizer.with_chat_template(chat_template)
            are_text = message_style(read).arguments_are_text
    changed = []
    for number, message in enumerate(messages):
        fields = dict(message)
        if isinstance(content := fields.get("content"), list | tuple):
            fields["content"] = _joined(content, f"messages[{number}].content")
        if isinstance(calls := fields.get("tool_calls"), list | tuple):
            fields["tool_calls"] = [_with_arguments(call, are_text=are_text) for call in calls]
        changed.append(fields)
    return changed


def _joined(parts: Sequence[Any], param: str) -> str:
    texts = []
    for number, part in enumerate(parts):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
        if not isinstance(text, str):
            raise InvalidRequest(f"{param}[{number}] must be a text part: only text is served", param=param)
        texts.append(text)
    return "\n".join(texts)


def _with_arguments(call: Any, *, are_text: bool) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(given := function.get("arguments"), str | Mapping):
        return call
    if are_text:
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    else:
        arguments = as_object(given) if isinstance(given, str) else given
    return {**call, "function": {**function, "arguments": arguments}}


def _message(role: str, content: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def _render(tokenizer: Tokenizer, style: MessageStyle, *, content: str = "", reasoning: str = "") -> str:
    """Render a conversation with a call; "" if the template fails."""
    arguments = '{"word": "quokka"}' if style.arguments_are_text else {"word": "quokka"}
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
    answer = _message("assistant", content or style.empty_content, tool_calls=[call])
    if reasoning:
        answer["reasoning_content"] = reasoning
    result = _message("tool", "a marsupial", tool_call_id="abcdefghi")
    return _rendered(tokenizer, _message("user", "Look it up."), answer, result)


def _rendered(tokenizer: Tokenizer, *messages: Mapping[str, Any]) -> str:
    """Render a conversation; "" if the template fails."""
    with contextlib.suppress(InvalidRequest):
        return tokenizer.render_chat_template(list(messages))
    return ""


def _shows_call(text: str) -> bool:
    """Return true if the text shows the call, with arguments that are not JSON-encoded twice, which would escape
    quotes.
    """
    return "look_up" in text and "quokka" in text and '\\"' not in text
