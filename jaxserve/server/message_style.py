"""Find out how a chat template expects the calls of earlier turns and system messages: templates differ, and some fail
or leave out a message if it is wrong.
"""

import contextlib
from collections.abc import Sequence

from jaxserve.errors import InvalidRequest
from jaxserve.server.protocol.messages import ChatMessage, MessageStyle, template_messages
from jaxserve.server.protocol.tools import FunctionCall, ToolCall
from jaxserve.tokenizer import Tokenizer

# The most common first: arguments as an object, and an empty text as content.
_STYLES = tuple(MessageStyle(are_text, empty) for are_text in (False, True) for empty in ("", None))
_ARGUMENTS = '{"word": "quokka"}'


def message_style(tokenizer: Tokenizer) -> MessageStyle:
    """Return the first style in which the model's template shows a call with its argument, else the most common one."""
    style = next((style for style in _STYLES if _shows_call(_render(tokenizer, style))), _STYLES[0])
    fails = _render(tokenizer, style) and not _render(tokenizer, style, content="Wait.", reasoning="Hm.")
    system, late = ChatMessage(role="system", content="Be wombat."), ChatMessage(role="system", content="Be quokka.")
    user = ChatMessage(role="user", content="Hello.")
    answer = ChatMessage(role="assistant", content="Yes?")

    def shows_both(*messages: ChatMessage) -> bool:
        text = _rendered(tokenizer, style, messages)
        return "wombat" in text and "quokka" in text

    return style._replace(
        shows_both=not fails,
        shows_systems=shows_both(system, late, user),
        shows_late_system=shows_both(system, user, answer, late, user),
    )


def _render(tokenizer: Tokenizer, style: MessageStyle, *, content: str = "", reasoning: str = "") -> str:
    """Render a conversation with a call; "" if the template fails."""
    call = ToolCall(id="abcdefghi", function=FunctionCall(name="look_up", arguments=_ARGUMENTS))
    messages = [
        ChatMessage(role="user", content="Look it up."),
        ChatMessage(role="assistant", content=content, reasoning=reasoning, tool_calls=[call]),
        ChatMessage(role="tool", content="a marsupial", tool_call_id=call.id),
    ]
    return _rendered(tokenizer, style, messages)


def _rendered(tokenizer: Tokenizer, style: MessageStyle, messages: Sequence[ChatMessage]) -> str:
    """Render a conversation; "" if the template fails."""
    rendered = template_messages(messages, style, continue_final_message=False, add_generation_prompt=True)
    with contextlib.suppress(InvalidRequest):
        return tokenizer.render_chat_template(rendered)
    return ""


def _shows_call(text: str) -> bool:
    """Return true if the text shows the call, with arguments that are not JSON-encoded twice, which would escape
    quotes.
    """
    return "look_up" in text and "quokka" in text and '\\"' not in text
