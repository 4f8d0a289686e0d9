"""A conversation as the text that the model reads; chat and POST /tokenize share it."""

from pathlib import Path

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.server.protocol.messages import MessageStyle, template_messages
from jaxserve.server.protocol.template_fields import TemplateFields, template_variables
from jaxserve.server.protocol.tools import template_tools
from jaxserve.tokenizer import Tokenizer


def served_tokenizer(tokenizer: Tokenizer, config: ServerConfig) -> Tokenizer:
    """`tokenizer`, with the operator's chat template if there is one. Raises ConfigError."""
    given = config.chat_template
    if given is None:
        return tokenizer
    if "{{" in given or "{%" in given:
        return tokenizer.with_chat_template(given)
    try:
        template = Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read chat_template {given}: {error}") from error
    return tokenizer.with_chat_template(template)


def render_chat(tokenizer: Tokenizer, style: MessageStyle, body: TemplateFields) -> str:
    """The model's chat template over the messages. A final message to be continued gets no prompt for a new one.

    `style` is the template's own (`message_style`). Raises InvalidRequest, naming the field.
    """
    continues = bool(body.continue_final_message)
    messages = template_messages(
        body.messages or [],
        style,
        continue_final_message=continues,
        add_generation_prompt=body.add_generation_prompt,
    )
    tools = body.tools if body.tools and body.tool_choice != "none" else None
    return tokenizer.render_chat_template(
        messages,
        tools=None if tools is None else template_tools(tools),
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        template_kwargs=template_variables(body),
    )
