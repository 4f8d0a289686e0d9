"""What a request may say about how its tokens are chosen: plain data, importable without jax.

A parameter is a field of `SamplingParams` and a row of `PARAMETERS`. The flags of the command line, the fields of HTTP
requests and their documentation, the defaults of a model and what beam search refuses follow from them.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.unsupported import without_foreign
from jaxserve.values import FieldNames, Rule, convert, rules

DEFAULT_MAX_LOGPROBS = 20
"""Most likely tokens that a request may ask for, unless the engine is told otherwise."""
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STOP_STRINGS = 128
MAX_STOP_LENGTH = 1024
"""Maximum characters of a stop string, each of which is compared with every character of the text."""
MAX_STOP_BYTES = 16 * 1024
"""Maximum UTF-8 bytes of all stop strings together."""
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 300
LOGIT_BIAS_LIMIT = 100.0
MAX_BAD_WORDS = 64
MAX_BAD_WORD_LENGTH = 256
MAX_BAD_WORD_TOKENS = 8
MAX_N = 128
SEED_LIMIT = 2**63
MAX_INT32 = 2**31 - 1

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT32)]
NumLogprobs = Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT32)]
Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]
Probability = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT32)]
StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_LENGTH)]


class Parameter(NamedTuple):
    """What a field of SamplingParams is besides its type, range and default."""

    meaning: str
    """The help of its flag, and its row in docs/fields.md."""
    neutral: Sequence[Any] | None = ()
    """Values besides None that ask for nothing. None: beam search follows the parameter, whatever its value."""
    group: Literal["sampling", "output", ""] = "sampling"
    """The section of the help in which its flag is; "" if it has none."""
    hub: str = ""
    """Its name in generation_config.json, where a model may have a default of its own."""
    is_field: bool = True
    """True if HTTP requests have a field of this name and type. The table of fields has rows of its own for others."""


# fmt: off
PARAMETERS: Mapping[str, Parameter] = {
    "n": Parameter("number of answers to each prompt", None, "output", is_field=False),
    "max_tokens": Parameter("tokens to generate at most", None, "output", "max_new_tokens", is_field=False),
    "min_tokens": Parameter("tokens before the answer may end", (0,), "output"),
    "temperature": Parameter("0: always the most likely token", (0, 1), hub="temperature"),
    "top_p": Parameter("draw among the top tokens of this total probability", (1,), hub="top_p"),
    "top_k": Parameter("draw among the top K tokens; 0 or -1: all", (0, -1), hub="top_k"),
    "min_p": Parameter("draw among tokens with this fraction of the top probability", (0,), hub="min_p"),
    "top_n_sigma": Parameter("draw among logits within N standard deviations of the top; 0 or -1: all", (0, -1)),
    "presence_penalty": Parameter("subtracted from logits of tokens in the answer", (0,)),
    "frequency_penalty": Parameter("like presence_penalty, for each occurrence", (0,)),
    "repetition_penalty": Parameter(
        "divides logits of tokens in prompt or answer", (1,), hub="repetition_penalty"),
    "logit_bias": Parameter("token id to what is added to its logit, -100 to 100", ({},)),
    "allowed_token_ids": Parameter("ids of the only tokens to draw among"),
    "bad_words": Parameter("texts never to write", ([],), "output"),
    "stop": Parameter("texts that end the answer", ([],), "output"),
    "stop_token_ids": Parameter("token ids that end the answer", None, "output"),
    "include_stop_str_in_output": Parameter("show the text that has ended the answer", None, "output"),
    "ignore_eos": Parameter("go on after the model's end of sequence", None, "output"),
    "seed": Parameter("the same seed gives the same text", None, ""),
    "logprobs": Parameter(
        "log probability of each token, and of the N most likely ones", (), "output", is_field=False),
    "prompt_logprobs": Parameter("log probabilities of the prompt's tokens", (), "", is_field=False),
    "logprob_token_ids": Parameter(
        "log probabilities of these tokens, in place of the most likely ones", ([],), "output"),
    "detokenize": Parameter("return text besides token ids", None, "", is_field=False),
    "skip_special_tokens": Parameter("leave special tokens out of the text", None, "output"),
    "structured_outputs": Parameter(
        'what the answer must be: {"json": SCHEMA}, {"regex": ...} ...', (), "output", is_field=False),
    "speculative_decoding": Parameter("false: verify no drafts for this request; the text is the same", None, ""),
}
# fmt: on


class StructuredOutputs(msgspec.Struct, metaclass=FieldNames, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint on a request's text: exactly one of the first six fields, and how its JSON is written.

    `json` is a JSON schema, as a dict or as its text; `json_object` means any JSON object; `regex` is an expression for
    the whole text (in Rust's syntax, with ASCII digits); `choice` is a list of possible texts; `grammar` is a
    context-free grammar in Lark's or in GBNF syntax; `structural_tag` describes a text with tagged parts, as
    in vLLM.

    `disable_additional_properties`: objects have only the properties that their schema names, if it names some and does
    not mention others; None leaves it to the server, and is True elsewhere. `disable_any_whitespace`: nothing separates
    the parts of JSON; `whitespace_pattern` is an expression for what may. Raises InvalidRequest, naming the field.
    """

    json: str | dict[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Annotated[Sequence[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1)] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_additional_properties: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        _convert_fields(self, _STRUCTURED_RULES, prefix="structured_outputs.")
        names = ("json", "regex", "choice", "grammar", "structural_tag")
        given = [name for name in names if getattr(self, name) is not None] + ["json_object"] * self.json_object
        if len(given) != 1:
            raise InvalidRequest(
                "structured_outputs takes one of json, json_object, regex, choice, grammar and structural_tag, got "
                f"{' and '.join(given) or 'none'}",
                param="structured_outputs",
            )


class SamplingParams(msgspec.Struct, metaclass=FieldNames, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of one request are chosen. Names and meanings are those of vLLM and the OpenAI API.

    Penalties, `logit_bias`, `allowed_token_ids`, `bad_words` and `min_tokens` change the logits in that order. Of the
    tokens that remain, `top_n_sigma` (of llama.cpp) keeps those with logits at most so many standard deviations below
    the largest. Then follow the temperature, `top_k`, `top_p` and `min_p`. `temperature=0` and `top_p=0` are greedy.
    `top_k` 0 or -1 is off, and so is `top_n_sigma` of 0 or less. `max_tokens=None` means up to the context length.
    `logprobs=k` returns the log probability of the sampled token and of the k most likely ones, from the raw
    distribution (before all of this); -1 returns all, if the vocabulary has no more tokens than the largest k.
    `logprob_token_ids` asks for the log probabilities of these tokens in place of the most likely ones. Biases are
    clamped to [-100, 100]. `structured_outputs` constrains the text. A `seed` determines the text, whatever else is in
    the batch. `speculative_decoding=False` has no drafts verified for this request, if the engine has some: that
    changes when tokens come, not which.

    Numbers, flags and lists may be those of NumPy. Fields of vLLM that are not here are taken if they ask for nothing.
    Raises InvalidRequest, naming the field, when a value is of a wrong type or out of its range, or a field of
    vLLM is not followed, and TypeError for an unknown field.
    """

    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_N)] = 1
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_INT32)] | None = 16
    min_tokens: Count = 0
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] = 1.0
    top_p: Probability = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT32)] = 0
    min_p: Probability = 0.0
    top_n_sigma: Annotated[float, msgspec.Meta(ge=-1.0, le=100.0)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0, le=100.0)] = 1.0
    logit_bias: Annotated[Mapping[TokenId, float], msgspec.Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    allowed_token_ids: Annotated[Sequence[TokenId], msgspec.Meta(min_length=1)] | None = None
    bad_words: (
        Annotated[
            Sequence[Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_BAD_WORD_LENGTH)]],
            msgspec.Meta(max_length=MAX_BAD_WORDS),
        ]
        | None
    ) = ()
    stop: Annotated[Sequence[StopString], msgspec.Meta(max_length=MAX_STOP_STRINGS)] | StopString | None = ()
    stop_token_ids: Annotated[Sequence[TokenId], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: Annotated[int, msgspec.Meta(ge=-SEED_LIMIT, le=SEED_LIMIT - 1)] | None = None
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    logprob_token_ids: Annotated[Sequence[TokenId], msgspec.Meta(max_length=MAX_LOGPROB_TOKEN_IDS)] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    speculative_decoding: bool = True

    @classmethod
    def accepted(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments without those of vLLM that ask for nothing. Raises InvalidRequest for its others."""
        return without_foreign(fields)

    def __post_init__(self) -> None:
        _convert_fields(self, _SAMPLING_RULES)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", param="min_tokens"
            )
        num_bytes = sum(len(stop.encode()) for stop in self.stop_strings)
        if num_bytes > MAX_STOP_BYTES:
            raise InvalidRequest(f"stop has {num_bytes} bytes, at most {MAX_STOP_BYTES} are allowed", param="stop")
        if self.logprob_token_ids:  # in place of the most likely ones
            msgspec.structs.force_setattr(self, "logprobs", 0)
        if self.logit_bias:
            limit = LOGIT_BIAS_LIMIT
            clamped = {token_id: min(max(bias, -limit), limit) for token_id, bias in self.logit_bias.items()}
            msgspec.structs.force_setattr(self, "logit_bias", clamped)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always chosen."""
        return self.temperature == 0.0 or self.top_p == 0.0

    @property
    def has_penalties(self) -> bool:
        """True if the logits depend on earlier tokens."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


class BeamSearchParams(msgspec.Struct, metaclass=FieldNames, frozen=True, kw_only=True):
    """How beams are searched.

    `beam_width` sequences are kept. A finished one is scored by its log probability divided by its number of tokens to
    the power of `length_penalty`. With `early_stopping` True a search ends when `beam_width` sequences have finished;
    with False, when no beam would have a better score if it ended now; with "never", when none can reach a better
    one within `max_tokens`. None for `max_tokens` means up to the context length. `temperature` is there for vLLM's
    sake and must be 0. `include_stop_str_in_output` keeps the token that ended a sequence.

    Raises InvalidRequest, naming the field, for a wrong value, TypeError for an unknown field.
    """

    beam_width: Annotated[int, msgspec.Meta(ge=1, le=MAX_N)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_INT32)] | None = 16
    ignore_eos: bool = False
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=0.0)] = 0.0
    length_penalty: Annotated[float, msgspec.Meta(ge=-100.0, le=100.0)] = 1.0
    early_stopping: bool | Literal["never"] = False
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _convert_fields(self, _BEAM_RULES)


_REQUIRED = object()
_STRUCTURED_RULES = rules(StructuredOutputs)
_SAMPLING_RULES = rules(SamplingParams)
_BEAM_RULES = rules(BeamSearchParams)


def _convert_fields(owner: msgspec.Struct, rules: Mapping[str, Rule], *, prefix: str = "") -> None:
    """Replace the given values of the fields by plain ones. Raises InvalidRequest, naming the field."""
    required = len(rules) - len(owner.__struct_defaults__)
    for (name, rule), default in zip(rules.items(), (_REQUIRED,) * required + owner.__struct_defaults__, strict=True):
        value = getattr(owner, name)
        if value is not default:
            msgspec.structs.force_setattr(owner, name, convert(prefix + name, value, rule))
