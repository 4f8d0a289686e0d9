"""Slots: the state that the device keeps of each running request between steps.

A request holds one slot from admission until it finishes or is preempted. Admission writes the whole row of the slot
(length, block table, sampling parameters); in each step the forward pass adds new block ids and its tokens to the
length, and `draw` writes the sampled token, so that the next step needs neither a token nor a position from the host.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, no_type_check

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32, UInt32

from jaxserve.sampling import state as sampling_state
from jaxserve.sampling.state import Extras, SamplingState
from jaxserve.scheduling.plan import Row
from jaxserve.speculative import Proposer


class Masks(NamedTuple):
    """The tokens that slots may sample next: token i is allowed if bit i % 32 of word i // 32 is set."""

    slots: Int32[np.ndarray, " R"]
    words: UInt32[np.ndarray, "R Q W"]
    """The masks of the next token and of those behind drafts."""
    drafts: Int32[np.ndarray, "R width"]
    """With speculation, how many drafts of each row have their masks, how many tokens are forced, and these."""


ADMISSION_ROWS = 8
"""Rows that one admission upload carries; padding rows have an out-of-range slot."""

NUM_KNOWN_TOKENS = 512
"""Tokens of one request that a row of an upload for proposers carries; longer ones take several rows."""

NUM_LENGTHS = 4
"""Numbers of an admission before its block tables: slot, computed tokens, prompt tokens, most tokens in all."""


@no_type_check
@flax.struct.dataclass
class Drafts:
    """What the next step of N slots may verify: up to k tokens each, and what their proposer keeps."""

    token_ids: Int[Array, "N k"]
    counts: Int[Array, " N"]
    num_masked: Int[Array, " N"]
    """How many of the drafts that a step verifies the next draw may accept: those for which it has masks, where a
    grammar says what may follow.
    """
    forced: Int[Array, "N F"]
    """The only tokens that a grammar allows from the next one on: better drafts than any."""
    num_forced: Int[Array, " N"]
    proposer: Any
    acceptance_rates: Float[Array, " k"] | None = None
    """If drafts are accepted by chance, see `Speculation`."""


@no_type_check
@flax.struct.dataclass
class Slots:
    """Device state of N slots, each with a block table of M entries for each of G KV groups; donated."""

    last_tokens: Int[Array, " N"]
    num_computed: Int[Array, " N"]
    """Tokens of which K and V are written, once all steps before have run. The next step's begin at this position."""
    num_prompt_tokens: Int[Array, " N"]
    max_total_tokens: Int[Array, " N"]
    """Prompt and output tokens at which the request ends."""
    block_tables: Int[Array, "G N M"]
    sampling: SamplingState
    pooled: Float[Array, "N E"]
    """Float32 sums or maxima of the hidden states so far, of those that want one of all tokens (`pooling`)."""
    drafts: Drafts | None = None
    """None without speculation."""


def num_forced(num_drafts: int) -> int:
    """Return how many forced tokens a slot keeps: those that one step may draw, and those that the next may verify."""
    return 2 * num_drafts + 1


def init_slots(
    *,
    num_slots: int,
    max_blocks: int,
    num_groups: int,
    vocab_size: int,
    hidden_size: int,
    proposer: Proposer | None = None,
    max_length: int = 0,
    acceptance_rates: Sequence[float] = (),
) -> Slots:
    """Return empty slots. A proposer keeps sequences of up to `max_length` tokens."""
    drafts = proposer and Drafts(
        token_ids=jnp.zeros((num_slots, proposer.num_drafts), jnp.int32),
        counts=jnp.zeros(num_slots, jnp.int32),
        num_masked=jnp.zeros(num_slots, jnp.int32),
        forced=jnp.zeros((num_slots, num_forced(proposer.num_drafts)), jnp.int32),
        num_forced=jnp.zeros(num_slots, jnp.int32),
        proposer=proposer.init_state(num_slots=num_slots, max_length=max_length),
        acceptance_rates=jnp.array(acceptance_rates, jnp.float32) if acceptance_rates else None,
    )
    return Slots(
        last_tokens=jnp.zeros(num_slots, jnp.int32),
        num_computed=jnp.zeros(num_slots, jnp.int32),
        num_prompt_tokens=jnp.zeros(num_slots, jnp.int32),
        max_total_tokens=jnp.zeros(num_slots, jnp.int32),
        block_tables=jnp.zeros((num_groups, num_slots, max_blocks), jnp.int32),
        sampling=sampling_state.init_state(
            num_slots, vocab_size, num_columns=1 if proposer is None else 1 + proposer.num_drafts
        ),
        pooled=jnp.zeros((num_slots, hidden_size), jnp.float32),
        drafts=drafts,
    )


def pack_admissions(rows: Sequence[Row], *, num_slots: int, max_blocks: int, num_groups: int) -> np.ndarray:
    """Return the upload for the first rows of up to ADMISSION_ROWS requests that have just been given a slot: [rows,
    NUM_LENGTHS + G * M + scalars] int32.
    """
    size = num_groups * max_blocks
    end = NUM_LENGTHS + size
    packed = np.zeros((ADMISSION_ROWS, end + sampling_state.NUM_SCALARS), np.int32)
    packed[:, 0] = num_slots
    for upload, row in zip(packed, rows, strict=False):
        request = row.request
        upload[:NUM_LENGTHS] = row.slot, row.start, request.num_prompt_tokens, request.max_total_tokens
        for first, table in zip(range(NUM_LENGTHS, end, max_blocks), request.block_tables, strict=True):
            upload[first : first + len(table)] = table
        upload[end:] = sampling_state.pack_scalars(request.asked)
    # A kernel may fetch a block that it masks out, so any valid id will do for a block that was given back.
    packed[:, NUM_LENGTHS:end] = np.maximum(packed[:, NUM_LENGTHS:end], 0)
    return packed


def admit(slots: Slots, packed: Int[Array, "rows width"]) -> Slots:
    """Write the rows of newly admitted requests, without drafts. Runs inside a program; `slots` is donated."""
    num_groups, _, max_blocks = slots.block_tables.shape
    end = NUM_LENGTHS + num_groups * max_blocks
    slot_ids, starts, num_prompt_tokens, max_total_tokens = packed[:, :NUM_LENGTHS].T
    tables = packed[:, NUM_LENGTHS:end].reshape(-1, num_groups, max_blocks).swapaxes(0, 1)
    drafts = slots.drafts
    if drafts is not None:
        drafts = dataclasses.replace(
            drafts,
            counts=drafts.counts.at[slot_ids].set(0, mode="drop"),
            num_masked=drafts.num_masked.at[slot_ids].set(drafts.token_ids.shape[1], mode="drop"),
            num_forced=drafts.num_forced.at[slot_ids].set(0, mode="drop"),
        )
    return dataclasses.replace(
        slots,
        num_computed=slots.num_computed.at[slot_ids].set(starts, mode="drop"),
        num_prompt_tokens=slots.num_prompt_tokens.at[slot_ids].set(num_prompt_tokens, mode="drop"),
        max_total_tokens=slots.max_total_tokens.at[slot_ids].set(max_total_tokens, mode="drop"),
        block_tables=slots.block_tables.at[:, slot_ids].set(tables, mode="drop"),
        sampling=sampling_state.admit(slots.sampling, slot_ids, packed[:, end:]),
        drafts=drafts,
    )


def admit_extras(slots: Slots, slot: Int[Array, ""], extras: Extras) -> Slots:
    """Write what only processors need of a newly admitted request. In graph, `slots` donated."""
    return dataclasses.replace(slots, sampling=sampling_state.admit_extras(slots.sampling, slot, extras))


def pack_tokens(rows: Sequence[Row], *, num_slots: int) -> Iterator[np.ndarray]:
    """Yield the uploads by which proposers learn the tokens of new requests: [rows, 2 + tokens] int32, of each row its
    slot, the position of the first token, and tokens padded with 0.
    """
    pieces = (
        (row.slot, first, row.request.token_ids[first : first + NUM_KNOWN_TOKENS])
        for row in rows
        for first in range(0, len(row.request.token_ids), NUM_KNOWN_TOKENS)
    )
    for some in itertools.batched(pieces, ADMISSION_ROWS):
        packed = np.zeros((ADMISSION_ROWS, 2 + NUM_KNOWN_TOKENS), np.int32)
        packed[:, 0] = num_slots
        for upload, (slot, first, token_ids) in zip(packed, some, strict=False):
            upload[:2] = slot, first
            upload[2 : 2 + len(token_ids)] = token_ids
        yield packed


def admit_tokens(slots: Slots, packed: Int[Array, "rows width"], *, proposer: Proposer) -> Slots:
    """Give a proposer tokens of newly admitted requests. In graph, `slots` donated."""
    assert slots.drafts is not None
    state = proposer.admit(slots.drafts.proposer, packed[:, 0], packed[:, 1], packed[:, 2:])
    return dataclasses.replace(slots, drafts=dataclasses.replace(slots.drafts, proposer=state))


def pack_masks(masks: Masks, *, num_rows: int, num_slots: int) -> UInt32[np.ndarray, "rows width"]:
    """Return the upload of masks, padded to `num_rows` rows; padding rows have a slot that is out of range."""
    size = len(masks.slots)
    width = masks.drafts.shape[1]
    num_words = math.prod(masks.words.shape[1:])
    packed = np.zeros((num_rows, 1 + width + num_words), np.uint32)
    packed[:, 0] = num_slots
    packed[:size, 0] = masks.slots
    packed[:size, 1 : 1 + width] = masks.drafts
    packed[:size, 1 + width :] = masks.words.reshape(size, num_words)
    return packed


def allow(slots: Slots, packed: UInt32[Array, "rows width"]) -> Slots:
    """Restrict slots to the tokens of their masks, of as many columns as the upload has. Runs inside a program; `slots`
    is donated.
    """
    extras, drafts = slots.sampling.extras, slots.drafts
    slot_ids, rest = packed[:, 0].astype(jnp.int32), packed[:, 1:]
    if drafts is not None:
        size = 2 + drafts.forced.shape[1]
        numbers, rest = rest[:, :size].astype(jnp.int32), rest[:, size:]
        drafts = dataclasses.replace(
            drafts,
            num_masked=drafts.num_masked.at[slot_ids].set(numbers[:, 0], mode="drop"),
            num_forced=drafts.num_forced.at[slot_ids].set(numbers[:, 1], mode="drop"),
            forced=drafts.forced.at[slot_ids].set(numbers[:, 2:], mode="drop"),
        )
    words = rest.reshape(rest.shape[0], -1, extras.allowed_mask.shape[2])
    allowed_mask = extras.allowed_mask.at[slot_ids, : words.shape[1]].set(words, mode="drop")
    extras = dataclasses.replace(extras, allowed_mask=allowed_mask)
    return dataclasses.replace(slots, sampling=dataclasses.replace(slots.sampling, extras=extras), drafts=drafts)
