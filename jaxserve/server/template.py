"""A conversation as the text that the model reads; chat and POST /tokenize share it."""

from typing import Any, Protocol

from jaxserve.server.generation import check_text_length
from jaxserve.server.protocol.chat import ChatMessage, template_kwargs, template_messages
from jaxserve.server.state import ServerState


class Conversation(Protocol):
    """The fields of a body that make a prompt."""

    messages: list[ChatMessage]
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


def render_chat(state: ServerState, body: Conversation) -> str:
    """The model's chat template over the messages. A final message to be continued gets no prompt for a new one.

    Raises InvalidRequest, naming the field, and ContextLengthExceeded for what can never fit.
    """
    continues = bool(body.continue_final_message)
    messages = template_messages(
        body.messages, continue_final_message=continues, add_generation_prompt=body.add_generation_prompt
    )
    text = state.frontend.tokenizer.render_chat_template(
        messages,
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        template_kwargs=template_kwargs(body.chat_template_kwargs),
    )
    check_text_length(text, state)
    return text
