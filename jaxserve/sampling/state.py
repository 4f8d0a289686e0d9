"""SamplingState: every request's sampling parameters and history, in arrays indexed by slot that stay on the device.

`pack_*` run on the host when a request is admitted (again after a preemption). `admit*` run on the device: `admit` in a
forward pass or before it, `admit_extras` before it. Slots are reused: `admit` replaces the scalars, whose feature bits
decide if a slot's extras are read, so that the extras of an earlier request have no effect.
"""

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int32, UInt32

from jaxserve.layers.pytrees import pytree
from jaxserve.request import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    EngineRequest,
)
from jaxserve.sampling.features import features

# Below this, sampling is as good as an argmax; at it, logits / temperature is still far from overflow.
MIN_TEMPERATURE = 1e-6

NO_TOKEN = -1


class _Column(enum.IntEnum):
    """The columns of a slot's scalars; floats are stored as their bits."""

    FEATURES = 0
    TEMPERATURE = 1
    TOP_K = 2
    TOP_P = 3
    MIN_P = 4
    REPETITION_PENALTY = 5
    FREQUENCY_PENALTY = 6
    PRESENCE_PENALTY = 7
    MIN_TOKENS = 8
    SEED_LOW = 9
    SEED_HIGH = 10


NUM_SCALARS = len(_Column)


@no_type_check  # jax also rebuilds pytrees with leaves of other types
@pytree
class Extras:
    """The data that only the processors and `logprob_token_ids` need: NumPy arrays of one request, or device arrays of
    all slots with a leading axis.

    V is the vocabulary size. Sets of token ids are bit masks of W = ceil(V / 32) words: token i is bit i % 32 of word i
    // 32. Token ids outside the vocabulary are omitted.
    """

    prompt_mask: UInt32[Any, "*N W"]
    allowed_mask: UInt32[Any, "*N W"]
    stop_mask: UInt32[Any, "*N W"]
    output_counts: Int32[Any, "*N V"]
    bias_ids: Int32[Any, "*N biases"]
    """Token ids with a bias, padded with V."""
    bias_values: Float[Any, "*N biases"]
    bad_words: Int32[Any, "*N words tokens"]
    """Banned token sequences, right-aligned and padded with NO_TOKEN."""
    recent_tokens: Int32[Any, "*N tokens-1"]
    """The last output tokens, with the latest at the end, padded with NO_TOKEN on the left."""
    logprob_ids: Int32[Any, "*N asked"]
    """Tokens whose log probabilities are reported at each position, padded with V."""


@no_type_check  # jax also rebuilds pytrees with leaves of other types
@pytree
class SamplingState:
    """The sampling state of N slots; donated with the step."""

    scalars: Int32[Array, "N scalars"]
    extras: Extras


class RowParams(NamedTuple):
    """The scalars of a step's rows, by name. `features` are the bits of each row, `seed` its low and high word."""

    features: Int32[Array, " B"]
    temperature: Float[Array, " B"]
    top_k: Int32[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    repetition_penalty: Float[Array, " B"]
    frequency_penalty: Float[Array, " B"]
    presence_penalty: Float[Array, " B"]
    min_tokens: Int32[Array, " B"]
    seed: UInt32[Array, "B 2"]


def init_state(num_slots: int, vocab_size: int) -> SamplingState:
    """Return the state of `num_slots` empty slots. `vocab_size` is the width of the logits."""
    empty = _empty_extras(vocab_size)
    extras = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_slots, *leaf.shape)), empty)
    return SamplingState(scalars=jnp.zeros((num_slots, NUM_SCALARS), jnp.int32), extras=extras)


def pack_scalars(request: EngineRequest) -> Int32[np.ndarray, " scalars"]:
    """Pack a request's scalars into one row of words, to be uploaded and passed to `admit`."""
    params = request.params
    row = np.zeros(NUM_SCALARS, np.int32)
    floats = row.view(np.float32)
    row[_Column.FEATURES] = features(request)
    floats[_Column.TEMPERATURE] = 0.0 if params.is_greedy else max(params.temperature, MIN_TEMPERATURE)
    row[_Column.TOP_K] = max(params.top_k, 0)
    floats[_Column.TOP_P] = params.top_p
    floats[_Column.MIN_P] = params.min_p
    floats[_Column.REPETITION_PENALTY] = params.repetition_penalty
    floats[_Column.FREQUENCY_PENALTY] = params.frequency_penalty
    floats[_Column.PRESENCE_PENALTY] = params.presence_penalty
    row[_Column.MIN_TOKENS] = params.min_tokens
    words = row.view(np.uint32)
    words[_Column.SEED_LOW] = request.seed & 0xFFFFFFFF
    words[_Column.SEED_HIGH] = (request.seed >> 32) & 0xFFFFFFFF
    return row


def unpack_rows(state: SamplingState, slot_ids: Int32[Array, " B"]) -> RowParams:
    """Read the scalars of the rows' slots. Out-of-range slot ids, those of padding rows, read some slot's."""
    rows = state.scalars.at[slot_ids].get(mode="clip")

    def number(column: _Column) -> Float[Array, " B"]:
        return lax.bitcast_convert_type(rows[:, column], jnp.float32)

    return RowParams(
        features=rows[:, _Column.FEATURES],
        temperature=number(_Column.TEMPERATURE),
        top_k=rows[:, _Column.TOP_K],
        top_p=number(_Column.TOP_P),
        min_p=number(_Column.MIN_P),
        repetition_penalty=number(_Column.REPETITION_PENALTY),
        frequency_penalty=number(_Column.FREQUENCY_PENALTY),
        presence_penalty=number(_Column.PRESENCE_PENALTY),
        min_tokens=rows[:, _Column.MIN_TOKENS],
        seed=lax.bitcast_convert_type(rows[:, _Column.SEED_LOW : _Column.SEED_HIGH + 1], jnp.uint32),
    )


def admit(state: SamplingState, slot_ids: Int32[Array, " A"], scalars: Int32[Array, "A scalars"]) -> SamplingState:
    """Write the scalars of newly admitted requests into their slots. Slot ids >= N are padding and dropped."""
    return dataclasses.replace(state, scalars=state.scalars.at[slot_ids].set(scalars, mode="drop"))


def pack_extras(request: EngineRequest, token_ids: Sequence[int], num_prompt_tokens: int, *, vocab_size: int) -> Extras:
    """Pack the processors' data of a request that gets a slot, in shapes that depend on V only.

    `token_ids` are all its tokens, beginning with the prompt: the counts are rebuilt from them after a preemption.
    """
    params = request.params
    extras = _empty_extras(vocab_size)
    output = np.asarray(token_ids[num_prompt_tokens:], np.int64)
    recent = output[-(MAX_BAD_WORD_TOKENS - 1) :]
    extras.recent_tokens[len(extras.recent_tokens) - len(recent) :] = recent
    extras.output_counts[:] = np.bincount(_in_vocabulary(output, vocab_size), minlength=vocab_size)
    _set_bits(extras.prompt_mask, token_ids[:num_prompt_tokens], vocab_size)
    _set_bits(extras.allowed_mask, params.allowed_token_ids or (), vocab_size)
    _set_bits(extras.stop_mask, request.stop_token_ids, vocab_size)

    bias = {token: value for token, value in (params.logit_bias or {}).items() if 0 <= token < vocab_size}
    extras.bias_ids[: len(bias)] = list(bias.keys())
    extras.bias_values[: len(bias)] = list(bias.values())

    asked = params.logprob_token_ids or ()
    extras.logprob_ids[: len(asked)] = asked

    # A word with a token outside the vocabulary can never occur.
    words = [word for word in request.bad_word_ids if word and all(0 <= token < vocab_size for token in word)]
    assert len(words) <= MAX_BAD_WORDS
    for row, word in zip(extras.bad_words, words, strict=False):
        assert len(word) <= MAX_BAD_WORD_TOKENS
        row[MAX_BAD_WORD_TOKENS - len(word) :] = word
    return extras


def admit_extras(state: SamplingState, slot_id: Int32[Array, ""], extras: Extras) -> SamplingState:
    """Write the extras of a newly admitted request into its slot. A slot id >= N is dropped."""
    admitted = jax.tree.map(lambda held, new: held.at[slot_id].set(new, mode="drop"), state.extras, extras)
    return dataclasses.replace(state, extras=admitted)


def _empty_extras(vocab_size: int) -> Extras:
    num_words = -(-vocab_size // 32)
    return Extras(
        prompt_mask=np.zeros(num_words, np.uint32),
        allowed_mask=np.zeros(num_words, np.uint32),
        stop_mask=np.zeros(num_words, np.uint32),
        output_counts=np.zeros(vocab_size, np.int32),
        bias_ids=np.full(MAX_LOGIT_BIAS, vocab_size, np.int32),
        bias_values=np.zeros(MAX_LOGIT_BIAS, np.float32),
        bad_words=np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), NO_TOKEN, np.int32),
        recent_tokens=np.full(MAX_BAD_WORD_TOKENS - 1, NO_TOKEN, np.int32),
        logprob_ids=np.full(MAX_LOGPROB_TOKEN_IDS, vocab_size, np.int32),
    )


def _in_vocabulary(token_ids: Int[np.ndarray, " n"], vocab_size: int) -> Int[np.ndarray, " m"]:
    return token_ids[(token_ids >= 0) & (token_ids < vocab_size)]


def _set_bits(mask: UInt32[np.ndarray, " W"], token_ids: Iterable[int], vocab_size: int) -> None:
    ids = _in_vocabulary(np.fromiter(token_ids, np.int64), vocab_size)
    np.bitwise_or.at(mask, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
