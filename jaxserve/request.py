"""Requests and results: plain data, used by every room, importable without jax.

`EngineRequest` travels from the client to the engine, `EngineOutput` back; they are msgspec structs, so that the same
objects cross a process border as msgpack. `RequestOutput` is what callers see. `Request` is the engine's own view of a
running job: the scheduler is its only writer.
"""

import dataclasses
import enum
import math
import time
from typing import Literal, get_args

import msgspec

from jaxserve import errors
from jaxserve.errors import InvalidRequest, JaxserveError, QueueFull
from jaxserve.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
Pooling = Literal["last", "mean", "cls", "max", "weightedmean", "mean_sqrt_len"]
TruncationSide = Literal["left", "right"]


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


NO_BLOCK = -1
"""Entry of a block table whose block has been released."""


@dataclasses.dataclass(slots=True, eq=False, repr=False)
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

    asked: EngineRequest
    _: dataclasses.KW_ONLY
    arrival: int  # submission order, which breaks ties in priority
    num_groups: dataclasses.InitVar[int] = 1
    takes_drafts: bool = False  # whether its rows may verify drafts

    request_id: str = dataclasses.field(init=False)
    priority: int = dataclasses.field(init=False)
    token_ids: list[int] = dataclasses.field(init=False)
    num_prompt_tokens: int = dataclasses.field(init=False)
    max_total_tokens: int = dataclasses.field(init=False)
    block_tables: list[list[int]] = dataclasses.field(init=False)
    first_blocks: list[int] = dataclasses.field(init=False)
    num_pending: int = 0
    num_pending_drafts: int = 0
    proposed: list[int] = dataclasses.field(default_factory=list)  # drafts of its next row, as far as the host knows
    num_forced: int = 0  # tokens from the next one on that its grammar leaves no choice of
    acceptance_rate: float = 0.0
    num_judged_drafts: int = 0  # those that this rate follows from
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache at first admission
    num_indexed_blocks: int = 0  # leading blocks that have been offered to the prefix cache
    keep_at: tuple[int, ...] = ()  # numbers of tokens behind which layers' states are kept for others
    kept_at: float = math.inf  # the last of them, then that of its answer; infinite: it leaves none
    num_preemptions: int = 0
    queue_seconds: float | None = None  # None until the first admission
    # Chained hashes of the leading full blocks of token_ids, as far as needed.
    block_hashes: list[bytes] = dataclasses.field(default_factory=list)
    slot: int = -1
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None

    def __post_init__(self, num_groups: int) -> None:
        self.request_id, self.priority = self.asked.request_id, self.asked.priority
        self.token_ids = list(self.asked.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_total_tokens = self.num_prompt_tokens + self.asked.max_tokens
        self.block_tables = [[] for _ in range(num_groups)]
        self.first_blocks = [0] * num_groups

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
