"""Tokenizer: text to token ids and back, on the caller's side of the engine.

A request's text (or its chat, through the model's template) becomes ids here; every sampled id comes back through
`IncrementalDetokenizer`. Built on the `tokenizers` library. No remote code, no network.
"""

import codecs
import copy
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from jaxserve.chat_template import render, with_parts
from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.loading.affixes import read_affixes
from jaxserve.loading.gguf_tokenizer import read_tokenizer
from jaxserve.loading.json_files import eos_token_ids, read_object
from jaxserve.loading.tokenizer_files import first_line, read_tokenizer_files
from jaxserve.token_pieces import TokenPieces

# Arguments of transformers' apply_chat_template that are not variables of a template.
_NOT_TEMPLATE_VARIABLES = {
    *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "sanitize_control_tokens", "processor_kwargs", "tokenizer_kwargs"),
}


class Tokenizer:
    """The tokenizer of one model. Thread-safe, and a long text does not block other threads: even single texts are
    encoded as a batch, because the backend releases the interpreter's lock only for batches.

    Attributes:
        eos_token_ids: tokens that end a generation: the tokenizer's EOS and those of generation_config.json.
        special_token_ids: tokens that `skip_special_tokens` leaves out of the text.
        vocab_size: number of tokens; `max_token_id` may be larger where ids have gaps.
        adds_bos: true if `encode` adds special tokens, so that even the empty text has tokens.
        affixes: the ids that `encode` adds before and after a text.
        response_template: how an answer is to be read (transformers 5.13 and later), or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        response_template: Any = None,
        eos_token_ids: Iterable[int] = (),
    ):
        """Wrap a tokenizer of the `tokenizers` library.

        `special_tokens` are tokens by what they are for, such as bos_token; those that are not special yet become so.
        `chat_templates` are by name; the usual one is "default".
        """
        self._backend = backend
        self._template_defaults: dict[str, Any] = {}
        self._backend.no_truncation()
        self._backend.no_padding()
        self._special_tokens = dict(special_tokens or {})
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        backend.add_special_tokens([token for token in self._special_tokens.values() if token not in known])
        self._chat_template: str | None = None  # replaces the model's
        self._chat_templates = dict(chat_templates or {})
        self.response_template = response_template
        self._pieces = TokenPieces(backend)
        self.affixes = read_affixes(backend)
        self.bos_token_id = self._special_token_id("bos_token")
        eos = self._special_token_id("eos_token")
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*([] if eos is None else [eos]), *eos_token_ids]))
        self.special_token_ids: frozenset[int] = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.max_token_id: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.adds_bos: bool = bool(self.encode(""))

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read the tokenizer of a model directory or a GGUF file.

        Raises CheckpointError when there is none, or an unusable one.
        """
        path = Path(path)
        if path.suffix == ".gguf" and not path.is_dir():
            return cls._from_gguf(path)
        files = read_tokenizer_files(path)
        return cls(
            files.backend,
            special_tokens=files.special_tokens,
            chat_templates=files.chat_templates,
            response_template=files.response_template,
            eos_token_ids=eos_token_ids(read_generation_config(path), path / "generation_config.json"),
        )

    @classmethod
    def _from_gguf(cls, path: Path) -> "Tokenizer":
        read = read_tokenizer(path)
        return cls(
            read.backend,
            special_tokens={name: token for name, token in read.special.items() if token is not None},
            chat_templates=None if read.chat_template is None else {"default": read.chat_template},
            eos_token_ids=read.end_token_ids,
        )

    def _special_token_id(self, role: str) -> int | None:
        token = self._special_tokens.get(role)
        return None if token is None else self._backend.token_to_id(token)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `load` reads."""
        self._backend.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        config |= self._special_tokens
        if self._chat_templates:
            named = [{"name": name, "template": template} for name, template in self._chat_templates.items()]
            config["chat_template"] = (
                self._chat_templates["default"] if [*self._chat_templates] == ["default"] else named
            )
        if self.response_template is not None:
            config["response_template"] = self.response_template
        if self._backend.encode_special_tokens:
            config["split_special_tokens"] = True
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode `text` into token ids, with BOS if the model uses one. Raises InvalidRequest for lone surrogates."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Encode many texts in parallel."""
        for text in texts:
            _check_unicode(text)
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Encode two texts as one sequence, with the special tokens that the tokenizer's template for pairs has."""
        for text in (first, second):
            _check_unicode(text)
        return self._backend.encode_batch_fast([(first, second)])[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode `token_ids` into text; unknown ids are dropped. Raises InvalidRequest for a negative id."""
        if any(token_id < 0 for token_id in token_ids):
            raise InvalidRequest("token ids must not be negative", param="tokens")
        known = [token_id for token_id in token_ids if token_id <= self.max_token_id]
        return self._backend.decode_batch([known], skip_special_tokens=skip_special_tokens)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds to a text: possibly part of a UTF-8 character, empty for an unknown
        id.
        """
        return self._pieces.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """Return `token_bytes` as text, with U+FFFD for incomplete characters."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def vocabulary_token(self, token_id: int) -> str:
        """Return the token as the vocabulary spells it ("\u0120the"), empty for an unknown id."""
        return self._backend.id_to_token(token_id) or ""

    def vocabulary_id(self, token: str) -> int | None:
        """Return the id of a token that is spelled as in the vocabulary, or None."""
        return self._backend.token_to_id(token)

    def encode_plain(self, text: str) -> list[int]:
        """Encode `text` without recognizing added tokens in it, and without adding special tokens."""
        return self._plain_backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    @functools.cached_property
    def _plain_backend(self) -> Any:
        fields = json.loads(self._backend.to_str())
        fields["added_tokens"] = []
        fields["post_processor"] = None
        return type(self._backend).from_str(json.dumps(fields))

    def split_at_added_tokens(self, text: str) -> list[str | int]:
        """Return the ids of the added tokens that are spelled in `text`, special or not, and the texts between them."""
        pieces = self._added_tokens.split(text) if self._added_tokens.pattern else [text]
        ids = self._backend.token_to_id
        return [(ids(piece) or 0) if index % 2 else piece for index, piece in enumerate(pieces) if piece]

    @functools.cached_property
    def _added_tokens(self) -> re.Pattern[str]:
        tokens = sorted((token.content for token in self._backend.get_added_tokens_decoder().values()), key=len)
        spelled = "|".join(re.escape(token) for token in reversed(tokens) if token)
        return re.compile(f"({spelled})" if spelled else "")

    def added_token_id(self, token: str) -> int | None:
        """Return the id of the added token with this text, special or not, or None."""
        token_id = self._backend.token_to_id(token)
        return token_id if token_id in self._backend.get_added_tokens_decoder() else None

    @property
    def strips_first_space(self) -> bool:
        """True if the decoder drops one space at the start of a text (sentencepiece puts one there)."""
        return self._pieces.strips_first_space

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, if it has one; of several named ones, the default."""
        return self._chat_template or self._chat_templates.get("default")

    @property
    def has_chat_template(self) -> bool:
        """True if the model has a chat template."""
        return bool(self._chat_template or any(self._chat_templates.values()))

    def with_chat_template(self, template: str) -> "Tokenizer":
        """Return a copy that uses the operator's chat template. Raises ConfigError if it is not valid jinja."""
        changed = copy.copy(self)
        changed._chat_template = template
        try:
            changed.render_chat_template([{"role": "user", "content": "?"}])
        except InvalidRequest as error:  # a valid template may still refuse any conversation
            cause = error.__cause__
            if isinstance(cause, jinja2.TemplateSyntaxError):
                raise ConfigError(f"chat_template, line {cause.lineno}: {cause.message}") from cause
        return changed

    @property
    def template_defaults(self) -> Mapping[str, Any]:
        """Variables of the chat template that a request may replace."""
        return self._template_defaults

    def with_template_defaults(self, variables: Mapping[str, Any]) -> "Tokenizer":
        """Return a tokenizer whose chat template has these variables, unless they are given. Raises ConfigError."""
        if clash := _NOT_TEMPLATE_VARIABLES & variables.keys():
            raise ConfigError(
                f"default_chat_template_kwargs: not a variable of a chat template: {', '.join(sorted(clash))}"
            )
        changed = copy.copy(self)
        changed._template_defaults = dict(variables)
        return changed

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
        """Render a chat as the text that the model was trained on, in jinja's immutable sandbox.

        `template_kwargs` are further variables of the template (such as enable_thinking). `chat_template` replaces the
        model's own; it must come from the operator, never from a request. Raises InvalidRequest when there is no
        template or the template refuses the messages.
        """
        if chat_template is None and not self.has_chat_template:
            raise InvalidRequest(
                "this model has no chat template: use a text completion, or give a chat template", param="messages"
            )
        if not messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        template_kwargs = {**self._template_defaults, **(template_kwargs or {})}
        if clash := _NOT_TEMPLATE_VARIABLES & template_kwargs.keys():
            raise InvalidRequest(
                f"not a variable of a chat template: {', '.join(sorted(clash))}", param="chat_template_kwargs"
            )
        try:
            template = self._template(chat_template, has_tools=tools is not None)
            return render(
                template,
                with_parts(template, messages),
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables={**self._special_tokens, **template_kwargs},
            )
        except Exception as error:  # a template is a program: with odd messages it can fail in any way
            raise InvalidRequest(f"chat template: {first_line(error)}", param="messages") from error

    def _template(self, given: str | None, *, has_tools: bool) -> str:
        """Return the given template, which may be the name of one, or that of the model."""
        given = given or self._chat_template
        if given is not None:
            return self._chat_templates.get(given, given)
        for name in ("tool_use", "default") if has_tools else ("default",):
            if name in self._chat_templates:
                return self._chat_templates[name]
        raise ValueError(f"the model has several and no default one: name one of {', '.join(self._chat_templates)}")


class IncrementalDetokenizer:
    """Converts the tokens of one sequence into text as they arrive, at constant cost per token.

    Every token is a run of bytes, so text is a UTF-8 stream: a character is emitted whole, with the token that
    completes it. The concatenation of all results equals `Tokenizer.decode` of all tokens, except for malformed runs of
    byte-fallback tokens, where one U+FFFD replaces each broken character instead of each byte.

    `prompt_token_ids` is what comes before: it decides if a leading space belongs to the text, unless
    `keeps_first_space`, and the first tokens may complete a character that it began; if they do not, nothing of that
    character is emitted. `visible_special_tokens` are never skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        visible_special_tokens: frozenset[int] = frozenset(),
        keeps_first_space: bool = False,
    ):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids - visible_special_tokens if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = self._visible_tail(prompt_token_ids)
        self._strips_next_space = tokenizer.strips_first_space and not tail and not keeps_first_space
        self._decoder.decode(tail)
        self._is_clean = not self._decoder.getstate()[0]  # no character is incomplete
        self._is_in_prompts_character = not self._is_clean

    def skips(self, token_id: int) -> bool:
        """Return true for a special token that is left out of the text."""
        return token_id in self._skipped

    def _visible_tail(self, token_ids: Sequence[int]) -> bytes:
        """Return the last bytes of the prompt: at least 3, if it has them, which hold any incomplete character."""
        tail = b""
        for token_id in reversed(token_ids):
            if token_id not in self._skipped:
                tail = self._tokenizer.token_bytes(token_id) + tail
            if len(tail) >= 3:
                break
        return tail

    def push(self, token_id: int) -> str:
        """Return the text that this token completes: empty for skipped tokens and inside a character."""
        if token_id in self._skipped:
            return ""
        piece = self._tokenizer.token_bytes(token_id)
        if self._is_in_prompts_character and piece:
            self._leave_prompt(piece)
        if self._is_clean and piece.isascii():  # true of most tokens, which need no decoder
            text = piece.decode()
        else:
            text = self._decoder.decode(piece)
            self._is_clean = not self._decoder.getstate()[0]
        return self._without_first_space(text) if self._strips_next_space else text

    def flush(self) -> str:
        """End the sequence; return U+FFFD if a character has been left incomplete, else nothing."""
        if self._is_in_prompts_character:
            return ""
        return self._without_first_space(self._decoder.decode(b"", final=True))

    def _leave_prompt(self, piece: bytes) -> None:
        """Decide at the first bytes of output if they continue the prompt's incomplete character; drop it otherwise."""
        self._is_in_prompts_character = False
        if piece[0] & 0xC0 != 0x80:  # not a continuation byte
            self._decoder.reset()
            self._is_clean = True

    def _without_first_space(self, text: str) -> str:
        if self._strips_next_space and text:
            self._strips_next_space = False
            return text.removeprefix(" ")
        return text


def read_generation_config(path: str | Path) -> dict[str, Any]:
    """Read generation_config.json of a model directory; {} if there is none. Raises CheckpointError if it is
    invalid.
    """
    file = Path(path) / "generation_config.json"
    return read_object(file) if file.is_file() else {}


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text is not valid Unicode: {error.reason}", param="prompt") from error
