"""The model that a server serves, as its routes see it."""

import dataclasses
import functools
import hashlib
import time
from collections.abc import Sequence

from jaxserve import __version__
from jaxserve.answers.choosing.message_style import MessageStyle, message_style
from jaxserve.answers.model_syntax import ModelSyntax
from jaxserve.engine.frontend import Frontend
from jaxserve.errors import ContextLengthExceeded, ModelNotFound
from jaxserve.request import Pooling

MIN_TEXT_LIMIT = 2**20
"""Bytes of one text that are tokenized whatever the context length; that takes 0.6 s of a core and 250 MB."""

TEXT_BYTES_PER_TOKEN = 16
"""Bytes of one text per token of the context that are tokenized: three times what texts have."""


@dataclasses.dataclass(kw_only=True)
class ServedModel:
    """A model, its engine's front end, and how its texts are written and read."""

    frontend: Frontend
    names: Sequence[str]
    """Names of the model in the API; answers have the first one."""
    syntax: ModelSyntax
    """How the model writes thoughts and tool calls."""
    pooling: Pooling | None = None
    """Default pooling of embeddings, None for the model's own."""
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        """The model's name in answers."""
        return self.names[0]

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identifies what makes the answers: this version and the served model."""
        digest = hashlib.sha256(f"{__version__}\n{self.name}\n{self.frontend.model}".encode()).hexdigest()
        return f"fp_{digest[:12]}"

    @functools.cached_property
    def message_style(self) -> MessageStyle:
        """How the chat template expects tool calls of earlier turns."""
        return message_style(self.frontend.tokenizer)

    @functools.cached_property
    def _max_token_length(self) -> int:
        """Bytes of the longest token: a text of k bytes has at least k / max_token_length tokens."""
        tokenizer = self.frontend.tokenizer
        lengths = (len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.max_token_id + 1))
        return max(1, max(lengths, default=1))

    def prepare(self) -> None:
        """Find out now what takes time to find out, so that no request waits for it."""
        _ = self.message_style, self._max_token_length

    def check_name(self, name: str | None) -> None:
        """Raise ModelNotFound unless `name` is served here. None is whatever is served."""
        if name is not None and name not in self.names:
            raise ModelNotFound(f"the model {name[:200]!r} does not exist", param="model", code="model_not_found")

    def check_text_length(self, text: str, *, may_exceed: bool = False, param: str = "prompt") -> None:
        """Refuse a text that cannot fit into the context however it is tokenized (unless it `may_exceed` the context),
        and one that is too long to tokenize, before time and memory are spent on it.

        Raises ContextLengthExceeded.
        """
        limit = self.frontend.client.info.max_model_len
        max_bytes = max(MIN_TEXT_LIMIT, TEXT_BYTES_PER_TOKEN * limit)
        num_bytes = len(text.encode(errors="surrogatepass"))
        if num_bytes > max_bytes:
            raise ContextLengthExceeded(
                f"the text has {num_bytes} bytes: a text of more than {max_bytes} is not tokenized, this model's "
                f"maximum context length being {limit} tokens",
                param=param,
                code="context_length_exceeded",
            )
        if may_exceed:
            return
        at_least = len(text) // self._max_token_length
        if at_least >= limit:
            raise ContextLengthExceeded.beyond(
                limit, f"the prompt has at least {at_least} tokens", param="prompt", lengths=(at_least, 0)
            )
