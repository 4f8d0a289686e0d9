"""Tokenizer: text to token ids and back, on the caller's side of the engine.

A request's text (or its chat, through the model's template) becomes ids here; every sampled id comes back through
`IncrementalDetokenizer`. Built on `transformers` (imported when a tokenizer is loaded), so that templates and special
tokens are what a model's authors tested. No remote code, no network.
"""

import codecs
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError, InvalidRequest

# Without one of these, transformers would build an empty tokenizer from the model's class name.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

# Arguments of transformers' apply_chat_template that are not variables of a template.
_NOT_TEMPLATE_VARIABLES = {
    *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
    *(
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
    ),
    *("processor_kwargs", "tokenizer_kwargs"),
}


class Tokenizer:
    """The tokenizer of one model. Safe to use from several threads.

    Attributes:
        eos_token_ids: what ends a generation: the tokenizer's EOS and those of generation_config.json.
        special_token_ids: tokens that `skip_special_tokens` leaves out of the text.
        vocab_size: number of tokens; `max_token_id` may be larger where ids have gaps.
        adds_bos: whether `encode` puts special tokens around a text, so that even the empty text has tokens.
    """

    def __init__(self, tokenizer: Any, *, eos_token_ids: Iterable[int] = ()):
        """Wrap a `transformers` tokenizer that is backed by the `tokenizers` library."""
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._pieces = _Pieces(self._backend)
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*eos, *eos_token_ids]))
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.special_token_ids: frozenset[int] = frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.max_token_id: int = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.adds_bos: bool = bool(self.encode(""))

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read the tokenizer of a model directory. Raises CheckpointError when there is none, or an unusable one."""
        path = Path(path)
        if not any((path / name).is_file() for name in _TOKENIZER_FILES):
            raise CheckpointError(f"no tokenizer in {path}: expected one of {', '.join(_TOKENIZER_FILES)}")
        auto_tokenizer = _import_auto_tokenizer()
        try:
            tokenizer = auto_tokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers lets anything through: json, tokenizers' bare Exception, KeyError
            raise CheckpointError(f"cannot read the tokenizer in {path}: {_first_line(error)}") from error
        if not getattr(tokenizer, "is_fast", False):
            raise CheckpointError(f"the tokenizer in {path} has no tokenizer.json form; convert it first")
        eos = read_generation_config(path).get("eos_token_id")
        return cls(tokenizer, eos_token_ids=[] if eos is None else [eos] if isinstance(eos, int) else eos)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with BOS if the model wants one. Raises InvalidRequest for lone surrogates."""
        _check_unicode(text)
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of many texts, in parallel."""
        for text in texts:
            _check_unicode(text)
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids that no token has are left out. Raises InvalidRequest for a negative id."""
        if any(token_id < 0 for token_id in token_ids):
            raise InvalidRequest("token ids must not be negative", param="tokens")
        known = [token_id for token_id in token_ids if token_id <= self.max_token_id]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text: possibly a part of a UTF-8 character, empty for an unknown id."""
        return self._pieces.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with U+FFFD for what is only a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    @property
    def strips_first_space(self) -> bool:
        """Whether the decoder drops one space at the start of a text (sentencepiece puts one there)."""
        return self._pieces.strips_first_space

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brings a chat template."""
        return bool(self._tokenizer.chat_template)

    def render_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> str:
        """A chat as the text that the model was trained on, rendered in jinja's immutable sandbox.

        `template_kwargs` are further variables of the template (such as enable_thinking). `chat_template` replaces
        the model's own; it must come from the operator, never from a request.

        Raises InvalidRequest when there is no template or the template refuses the messages.
        """
        if chat_template is None and not self.has_chat_template:
            raise InvalidRequest(
                "this model has no chat template: use a text completion, or give a chat template", param="messages"
            )
        if not messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        if clash := _NOT_TEMPLATE_VARIABLES & set(template_kwargs or ()):
            raise InvalidRequest(
                f"not a variable of a chat template: {', '.join(sorted(clash))}", param="chat_template_kwargs"
            )
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **(template_kwargs or {}),
            )
        except Exception as error:  # a template is a program: with odd messages it can fail in any way
            raise InvalidRequest(f"chat template: {_first_line(error)}", param="messages") from error

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[int]:
        """Token ids of `render_chat_template`. The template writes special tokens itself, so none are added."""
        text = self.render_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            chat_template=chat_template,
        )
        return self.encode(text, add_special_tokens=False)


class IncrementalDetokenizer:
    """Text of one sequence as its tokens come, at constant cost a token.

    Every token is a run of bytes, so text is a UTF-8 stream: a character is emitted with the token that completes it,
    never in halves. The concatenation of all results equals `Tokenizer.decode` of all tokens, except for malformed
    runs of byte-fallback tokens, where one U+FFFD stands for each broken character instead of each byte.

    `prompt_token_ids` is what comes before: it decides whether a leading space belongs to the text, and the first
    tokens may complete a character that it began.
    """

    def __init__(self, tokenizer: Tokenizer, *, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = self._visible_tail(prompt_token_ids)
        self._strips_next_space = tokenizer.strips_first_space and not tail
        self._decoder.decode(tail)

    def _visible_tail(self, token_ids: Sequence[int]) -> bytes:
        """The last bytes of the prompt: enough to hold the beginning of a character (3 bytes) if it has that many."""
        tail = b""
        for token_id in reversed(token_ids):
            if token_id not in self._skipped:
                tail = self._tokenizer.token_bytes(token_id) + tail
            if len(tail) >= 3:
                break
        return tail

    def push(self, token_id: int) -> str:
        """Text that this token completes: empty for skipped tokens and inside a character."""
        if token_id in self._skipped:
            return ""
        return self._without_first_space(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """End of the sequence: U+FFFD if a character has been left incomplete, else nothing."""
        return self._without_first_space(self._decoder.decode(b"", final=True))

    def _without_first_space(self, text: str) -> str:
        if self._strips_next_space and text:
            self._strips_next_space = False
            return text.removeprefix(" ")
        return text


class _Pieces:
    """What each token contributes to a text, read off the tokenizer's decoder.

    Two kinds of decoder cover the language models of the field: byte-level BPE spells bytes with stand-in characters
    (GPT-2's table), sentencepiece marks spaces with U+2581 and spells rare bytes as tokens `<0xE2>`.
    """

    def __init__(self, backend: Any):
        self._id_to_token = backend.id_to_token
        self._cache: dict[int, bytes] = {}
        self._is_byte_level = False
        self._has_byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self.strips_first_space = False
        decoder = backend.decoder
        for step in _decoder_steps(json.loads(decoder.__getstate__())) if decoder is not None else []:
            match step:
                case {"type": "ByteLevel"}:
                    self._is_byte_level = True
                case {"type": "ByteFallback"}:
                    self._has_byte_fallback = True
                case {"type": "Fuse"}:
                    pass  # joins tokens: there is nothing between them here either
                case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
                    self._replacements.append((pattern, content))
                case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                    self.strips_first_space = True
                case {"type": "Metaspace", "replacement": replacement}:
                    self._replacements.append((replacement, " "))
                    self.strips_first_space = step.get("prepend_scheme", "always") != "never"
                case _:
                    raise CheckpointError(f"tokenizers with a {step.get('type')} decoder are not supported: {step}")

    def bytes_of(self, token_id: int) -> bytes:
        piece = self._cache.get(token_id)
        if piece is None:
            token = self._id_to_token(token_id) if token_id >= 0 else None
            if token is None:
                return b""
            piece = self._cache[token_id] = self._spell(token)
        return piece

    def _spell(self, token: str) -> bytes:
        if self._is_byte_level:
            try:
                return bytes(map(_BYTE_OF_CHARACTER.__getitem__, token))
            except KeyError:  # an added token is spelled as it is
                return token.encode()
        if self._has_byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        return token.encode()


def _decoder_steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for child in decoder["decoders"] for step in _decoder_steps(child)]


def _byte_level_table() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the other bytes, in order, from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_table()


def read_generation_config(path: str | Path) -> dict[str, Any]:
    """generation_config.json of a model directory; empty where there is none. Raises CheckpointError if unreadable."""
    file = Path(path) / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"cannot read {file}: {_first_line(error)}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"cannot read {file}: not a JSON object")
    return config


def _import_auto_tokenizer() -> Any:
    """AutoTokenizer, without the advice that PyTorch is missing: this project has no use for it."""

    def is_no_advice(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger = logging.getLogger("transformers")
    logger.addFilter(is_no_advice)
    try:
        from transformers import AutoTokenizer
    finally:
        logger.removeFilter(is_no_advice)
    return AutoTokenizer


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text is not valid Unicode: {error.reason}", param="prompt") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
