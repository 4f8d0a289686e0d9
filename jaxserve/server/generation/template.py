"""Render a conversation as the text that the model reads; used by chat and POST /tokenize."""

import itertools
from typing import Any

from jaxserve.answers.choosing.message_style import MessageStyle
from jaxserve.answers.model_syntax import ModelSyntax
from jaxserve.answers.tools.definitions import template_tools
from jaxserve.server.generation.served_model import ServedModel
from jaxserve.server.protocol.messages import check_unusual_roles, last_content, template_messages
from jaxserve.server.protocol.template_fields import TemplateFields, template_variables, turns_thinking_off
from jaxserve.tokenizer import Tokenizer


def render_chat(tokenizer: Tokenizer, style: MessageStyle, body: TemplateFields) -> str:
    """Render the model's chat template over the messages. A final message to be continued gets no prompt for a new one.

    `style` is the template's own (`message_style`). Raises InvalidRequest, naming the field.
    """
    messages = _messages(style, body)
    text = _rendered(tokenizer, body, messages)
    check_unusual_roles(messages, text)
    return text


def thinks_first(model: ServedModel, body: TemplateFields, *, prompt: str) -> bool:
    """Return true if the answer to `prompt`, the rendered conversation, begins inside thoughts.

    Only the template itself opens thoughts, by what it writes at the end, which does not depend on the messages' texts.
    An assistant's message that is continued opens them as an answer does.
    """
    thoughts, tokenizer = model.syntax.thoughts, model.frontend.tokenizer
    if thoughts is None:
        return False
    messages = _messages(model.message_style, body)
    if body.continue_final_message:
        reader = model.syntax.reader([], is_open=False)
        assert reader is not None
        reader.push(messages[-1]["content"] or "")
        return reader.is_thinking
    is_open = thoughts.are_open(prompt)
    if is_open or thoughts.starts_open:  # a message may contain the mark
        other = _rendered(tokenizer, body, [_without_texts(message) for message in messages])
        pairs = zip(reversed(prompt), reversed(other), strict=False)
        length = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        is_open = thoughts.are_open(prompt[len(prompt) - length :])
    return thoughts.starts_open if is_open is None else is_open


def has_thought(body: TemplateFields, syntax: ModelSyntax) -> bool:
    """Return true if thoughts that the answer continues have more than their opening mark in the last message."""
    marks = () if syntax.thoughts is None else syntax.thoughts.opening
    text = last_content(body.messages) if body.continue_final_message and body.messages else ""
    return bool(text.strip()) and not text.rstrip().endswith(tuple(mark.strip() for mark in marks))


def may_think(tokenizer: Tokenizer, body: TemplateFields, *, prompt: str, syntax: ModelSyntax) -> bool:
    """Return false if the answer to `prompt` is to have no thoughts: the request or the operator has turned them off,
    or the prompt's last words have ended them.
    """
    if turns_thinking_off(body, tokenizer.template_defaults):
        return False
    thoughts = syntax.thoughts
    if thoughts is None or thoughts.reopens or thoughts.lead:  # a prompt that ends before a lead is a message's begin
        return True
    return not prompt.rstrip().endswith(tuple(mark.strip() for mark in thoughts.closing if mark.strip()))


def _messages(style: MessageStyle, body: TemplateFields) -> list[dict[str, Any]]:
    return template_messages(
        body.messages or [],
        style,
        continue_final_message=bool(body.continue_final_message),
        add_generation_prompt=body.add_generation_prompt,
    )


def _without_texts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its texts replaced by neutral ones."""
    texts = {name: "." for name in ("content", "reasoning_content") if message.get(name)}
    calls = [
        call | {"function": call["function"] | {"arguments": type(call["function"]["arguments"])()}}
        for call in message.get("tool_calls", ())
    ]
    return message | texts | ({"tool_calls": calls} if calls else {})


def _rendered(tokenizer: Tokenizer, body: TemplateFields, messages: list[dict[str, Any]]) -> str:
    continues = bool(body.continue_final_message)
    tools = body.tools if body.tools and body.tool_choice != "none" else None
    return tokenizer.render_chat_template(
        messages,
        tools=None if tools is None else template_tools(tools),
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        template_kwargs=template_variables(body),
    )
