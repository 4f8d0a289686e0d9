"""The tokenizer with what the operator says about the chat template."""

from pathlib import Path

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.tokenizer import Tokenizer


def served_tokenizer(tokenizer: Tokenizer, config: ServerConfig) -> Tokenizer:
    """Return `tokenizer`, with the operator's chat template and its variables if there are any. Raises ConfigError."""
    given = config.chat_template
    if config.default_chat_template_kwargs:
        tokenizer = tokenizer.with_template_defaults(config.default_chat_template_kwargs)
    if given is None:
        return tokenizer
    if "{{" in given or "{%" in given:
        return tokenizer.with_chat_template(given)
    try:
        template = Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read chat_template {given}: {error}") from error
    return tokenizer.with_chat_template(template)
