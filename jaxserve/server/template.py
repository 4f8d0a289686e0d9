"""A conversation as the text that the model reads; chat and POST /tokenize share it."""

from jaxserve.server.protocol.chat import ChatRequest, template_kwargs, template_messages
from jaxserve.server.protocol.utility import TokenizeRequest
from jaxserve.server.state import ServerState


def render_chat(state: ServerState, body: ChatRequest | TokenizeRequest) -> str:
    """The model's chat template over the messages. A final message to be continued gets no prompt for a new one.

    Raises InvalidRequest, naming the field.
    """
    continues = bool(body.continue_final_message)
    messages = template_messages(
        body.messages, continue_final_message=continues, add_generation_prompt=body.add_generation_prompt
    )
    return state.frontend.tokenizer.render_chat_template(
        messages,
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        template_kwargs=template_kwargs(body.chat_template_kwargs),
    )
