"""Requests and results: plain data, used by every room, importable without jax.

`SamplingParams` and `EngineRequest` travel from the client to the engine, `EngineOutput` back; they are msgspec
structs, so that the same objects cross a process border as msgpack. `RequestOutput` is what callers see. `Request` is
the engine's own view of a running job: the scheduler is its only writer.
"""

import enum
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec

from jaxserve import errors
from jaxserve.errors import InvalidRequest, JaxserveError, QueueFull
from jaxserve.unsupported import without_foreign
from jaxserve.values import FieldNames, Rule, convert, rules

FinishReason = Literal["stop", "length", "abort", "error"]
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
Pooling = Literal["last", "mean", "cls", "max", "weightedmean", "mean_sqrt_len"]
TruncationSide = Literal["left", "right"]

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
        given = [self.json, self.regex, self.choice, self.grammar, self.structural_tag, self.json_object or None]
        num_given = sum(field is not None for field in given)
        if num_given != 1:
            raise InvalidRequest(
                "structured_outputs takes one of json, json_object, regex, choice, grammar and structural_tag, got "
                f"{num_given}",
                param="structured_outputs",
            )


class SamplingParams(msgspec.Struct, metaclass=FieldNames, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of one request are chosen. Names and meanings are those of vLLM and the OpenAI API.

    Penalties, `logit_bias`, `allowed_token_ids`, `bad_words` and `min_tokens` change the logits in that order, before
    the temperature. `temperature=0` and `top_p=0` are greedy. `top_k` 0 or -1 is off. `max_tokens=None` means up to the
    context length. `logprobs=k` returns the log probability of the sampled token and of the k most likely ones, from
    the raw distribution (before temperature and penalties); -1 returns all, if the vocabulary has no more tokens
    than the largest k. `logprob_token_ids` asks for the log probabilities of these tokens in place of the most likely
    ones. Biases are clamped to [-100, 100]. `structured_outputs` constrains the text. A `seed` determines the text,
    whatever else is in the batch. `speculative_decoding=False` has no drafts verified for this request, if the engine
    has some: that changes when tokens come, not which.

    Numbers, flags and lists may be those of NumPy. Fields of vLLM that are not here are taken if they ask for nothing.
    Raises InvalidRequest, naming the field, when a value is of a wrong type or out
    of its range, or a field of vLLM is not followed, and TypeError for an unknown field.
    """

    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_N)] = 1
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_INT32)] | None = 16
    min_tokens: Count = 0
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] = 1.0
    top_p: Probability = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT32)] = 0
    min_p: Probability = 0.0
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


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate, as the engine gets it: `n > 1` has already become n of these.

    `group_id` names the siblings that have the same prompt (equal to `request_id` of the first). `bad_word_ids` are the
    token sequences of `params.bad_words`, `stop_token_ids` the complete set that ends the request (including the
    model's EOS ids unless `ignore_eos`): the engine never sees text. `grammar` is the grammar text that the output must
    match, see `structured.grammar`; "" allows anything. A lower `priority` runs earlier.

    With `pooling` the prompt is processed and nothing generated (`max_tokens` is 1, and the engine discards the token
    it draws): its one output has the `embedding`, made of the hidden states of its tokens: that of the "last" or of the
    first one ("cls"), their "mean", their sum divided by the root of their number ("mean_sqrt_len"), their mean with
    weights 1, 2, 3, ... ("weightedmean"), or the greatest value of each entry ("max").
    """

    request_id: str
    group_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""
    seed: int = 0
    priority: int = 0
    cache_salt: str = ""
    pooling: Pooling | None = None
    arrival_time: float = msgspec.field(default_factory=time.monotonic)

    @property
    def may_take_drafts(self) -> bool:
        """True if several of its tokens can be drawn in one step, because what a draw depends on besides the logits
        does not change with each token, and if its caller allows it.
        """
        if self.params.has_penalties or self.bad_word_ids or self.pooling:
            return False
        return self.params.speculative_decoding


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one position: the token itself with its rank (1 = most likely), then the top-k, in order.

    `asked` are those of `logprob_token_ids`, each with its logprob and rank.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]
    asked: list[tuple[int, float, int]] = []


class Refusal(msgspec.Struct, frozen=True, omit_defaults=True):
    """A JaxserveError as plain data, for an engine in another process: `kind` is the name of its class."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float = 0.0

    @classmethod
    def of(cls, error: JaxserveError) -> "Refusal":
        """Pack an error."""
        invalid = error if isinstance(error, InvalidRequest) else None
        return cls(
            kind=type(error).__name__,
            message=str(error),
            param=None if invalid is None else invalid.param,
            code=None if invalid is None else invalid.code,
            retry_after=error.retry_after if isinstance(error, QueueFull) else 0.0,
        )

    def error(self) -> JaxserveError:
        """Return the packed error; a plain JaxserveError if its class is not one of `errors`."""
        kind = getattr(errors, self.kind, JaxserveError)
        if issubclass(kind, InvalidRequest):
            return kind(self.message, param=self.param, code=self.code)
        if issubclass(kind, QueueFull):
            return kind(self.message, retry_after=self.retry_after)
        return kind(self.message)


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one engine step adds to one request. `finish_reason` is set on its last output only.

    `stop_reason` is the token id that ended the request, if one did. `logprobs` is parallel to `new_token_ids`.
    `prompt_logprobs` arrives in pieces with the prompt's chunks; entry i of the whole belongs to prompt token i + 1.
    `num_draft_tokens` drafts were verified for these tokens; all but the last of which are accepted ones.
    `queue_seconds` is the time from the request's arrival to its first step. `embedding` holds float32 numbers, little
    endian, not normalized. `refusal` is set if the caller's request is at fault: the engine has not even queued it, or
    cannot follow its grammar any further.
    """

    request_id: str
    new_token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    queue_seconds: float = 0.0
    num_draft_tokens: int = 0
    embedding: bytes | None = None
    error: str | None = None
    refusal: Refusal | None = None


class RequestStatus(enum.Enum):
    """The state of a request. PREEMPTED waits like WAITING, with its tokens kept and its blocks released."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


INITIAL_ACCEPTANCE_RATE = 0.5
"""Fraction of a request's drafts that are expected to be accepted before any has been verified."""

NO_BLOCK = -1
"""Entry of a block table whose block has been released."""


class Request:
    """The engine's state of one sequence. Written by the scheduler only (`queue_seconds`: by the engine).

    Invariants (checked by `Scheduler.check_integrity`):

    - `token_ids` are the prompt and every output token the host has seen; `num_pending` more have been sampled on the
      device, or will be by a step in flight, and `num_tokens` counts both. Each of the `num_pending_drafts` in flight
      that is accepted makes the sequence one token longer than that.
    - KV for the first `num_computed_tokens` positions is written, or will be by a step in flight; for that of accepted
      drafts, too. Each KV group has a block table that covers these positions and those of all drafts in flight:
      ceil(num_computed_tokens / block_size) ids if there have been no drafts, and a few more if some were rejected. The
      first `first_blocks[group]` are NO_BLOCK: released, since no future token attends to them.
    - `slot` is -1 unless RUNNING.
    """

    __slots__ = (
        "acceptance_rate",
        "arrival",
        "block_hashes",
        "block_tables",
        "finish_reason",
        "first_blocks",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_forced",
        "num_indexed_blocks",
        "num_judged_drafts",
        "num_pending",
        "num_pending_drafts",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "proposed",
        "queue_seconds",
        "request",
        "request_id",
        "slot",
        "status",
        "takes_drafts",
        "token_ids",
    )

    def __init__(self, request: EngineRequest, *, arrival: int, num_groups: int = 1, takes_drafts: bool = False):
        self.request = request
        self.takes_drafts = takes_drafts  # whether its rows may verify drafts
        self.request_id = request.request_id
        self.priority = request.priority
        self.arrival = arrival  # submission order, which breaks ties in priority
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_total_tokens = self.num_prompt_tokens + request.max_tokens
        self.num_pending = 0
        self.num_pending_drafts = 0
        self.proposed: list[int] = []  # drafts of its next row, as far as the host knows
        self.num_forced = 0  # tokens from the next one on that its grammar leaves no choice of
        self.acceptance_rate = INITIAL_ACCEPTANCE_RATE
        self.num_judged_drafts = 0  # those that this rate follows from
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0  # prompt tokens taken from the prefix cache at first admission
        self.num_indexed_blocks = 0  # leading blocks that have been offered to the prefix cache
        self.num_preemptions = 0
        self.queue_seconds: float | None = None  # None until the first admission
        self.block_tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.first_blocks = [0] * num_groups
        self.block_hashes: list[bytes] = []  # chained hashes of the leading full blocks of token_ids, as far as needed
        self.slot = -1
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the sequence, including those that only the device knows yet; the least it can be while
        drafts are in flight.
        """
        return len(self.token_ids) + self.num_pending

    @property
    def is_finished(self) -> bool:
        """True if no more output will come for this request."""
        return self.status is RequestStatus.FINISHED

    def held_blocks(self) -> list[int]:
        """Return the ids of the blocks that it holds, in order of their positions."""
        if len(self.block_tables) == 1:
            return self.block_tables[0][self.first_blocks[0] :]
        by_position = zip(*self.block_tables, strict=True)
        return [block_id for block_ids in by_position for block_id in block_ids if block_id != NO_BLOCK]

    def clear_blocks(self) -> None:
        """Clear the block tables once the blocks have been released."""
        self.block_tables = [[] for _ in self.block_tables]
        self.first_blocks = [0] * len(self.first_blocks)


class Logprob(msgspec.Struct, frozen=True):
    """One candidate token at one position: its log probability, its rank (1 = most likely) and its text."""

    logprob: float
    rank: int
    decoded_token: str


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One of the n continuations of a prompt.

    `logprobs` has one dict per generated token (token id -> Logprob: the sampled token, the top-k, and those of
    `logprob_token_ids`), if requested.
    `stop_reason` is the stop string or stop token id that ended it, None for EOS or length.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the sampled tokens' log probabilities, if logprobs were requested."""
        if self.logprobs is None:
            return None
        return sum(entry[token].logprob for token, entry in zip(self.token_ids, self.logprobs, strict=True))

    def __str__(self) -> str:
        return self.text


class RequestMetrics(msgspec.Struct, kw_only=True):
    """What speculation did for a prompt, counted as in the engine's metrics: how often drafts were verified, how many,
    and how many of them were accepted, in all and by their position in the draft.
    """

    spec_decode_num_drafts: int = 0
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    spec_decode_num_accepted_tokens_per_pos: list[int] = []

    def add(self, *, num_draft_tokens: int, num_accepted: int) -> None:
        """Count a step that verified drafts."""
        self.spec_decode_num_drafts += 1
        self.spec_decode_num_draft_tokens += num_draft_tokens
        self.spec_decode_num_accepted_tokens += num_accepted
        counts = self.spec_decode_num_accepted_tokens_per_pos
        counts += [0] * (num_draft_tokens - len(counts))
        for position in range(num_accepted):
            counts[position] += 1


class RequestOutput(msgspec.Struct, kw_only=True):
    """The result of a prompt so far or, in a stream, only what is new (`delta`).

    `prompt_logprobs` has one entry per prompt token, the first None. `num_cached_tokens` prompt tokens came from the
    prefix cache. `queue_seconds` is how long the prompt waited for its first step. `metrics` are those so far, None if
    no draft has been verified.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    queue_seconds: float = 0.0
    metrics: RequestMetrics | None = None
    finished: bool = False

    def __str__(self) -> str:
        return "\n".join(output.text for output in self.outputs)
