"""SamplingState: every request's sampling parameters and history, in arrays indexed by slot that stay on the device.

`pack_*` run on the host when a request is admitted (again after a preemption). `admit*` run on the device: `admit` in a
forward pass or before it, `admit_extras` before it. Slots are reused: `admit` replaces the scalars, whose feature bits
decide if a slot's extras are read, so that the extras of an earlier request have no effect.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, no_type_check

import flax.struct
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int32, UInt32

from jaxserve.request import EngineRequest
from jaxserve.sampling.features import features, is_neutral
from jaxserve.sampling.filters import LOGIT_FILTERS
from jaxserve.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    SamplingParams,
)

# Below this, sampling is as good as an argmax; at it, logits / temperature is still far from overflow.
MIN_TEMPERATURE = 1e-6

NO_TOKEN = -1

_PARAMETERS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("min_tokens", *LOGIT_FILTERS),
)
"""The parameters that are numbers, of which a step's rows have an array each."""

DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(SamplingParams) if field.name in _PARAMETERS}
"""The values with which they change nothing, but for the temperature."""

_INTEGERS = frozenset(name for name, default in DEFAULTS.items() if isinstance(default, int))
_COLUMNS = {name: index for index, name in enumerate(("features", *_PARAMETERS, "seed_low", "seed_high"))}
"""The columns of a slot's scalars; floats are stored as their bits."""

NUM_SCALARS = len(_COLUMNS)


@no_type_check  # jax also rebuilds pytrees with leaves of other types
@flax.struct.dataclass
class Extras:
    """The data that only the processors and `logprob_token_ids` need: NumPy arrays of one request, or device arrays of
    all slots with a leading axis.

    Q is the largest number of columns of a row, V the vocabulary size. Sets of token ids are bit masks of W = ceil(V /
    32) words: token i is bit i % 32 of word i // 32. Token ids outside the vocabulary are omitted.
    """

    prompt_mask: UInt32[Any, "*N W"]
    allowed_mask: UInt32[Any, "*N W"]
    """On the device [N, Q, W]: a mask for each column, as grammars have them."""
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
@flax.struct.dataclass
class SamplingState:
    """The sampling state of N slots; donated with the step."""

    scalars: Int32[Array, "N scalars"]
    extras: Extras


class RowParams(NamedTuple):
    """The scalars of a step's rows."""

    features: Int32[Array, " B"]
    """The bits of each row."""
    seed: UInt32[Array, "B 2"]
    """Its low and high word."""
    numbers: Mapping[str, Array]
    """The parameters that are numbers, in an array of B each."""


def init_state(num_slots: int, vocab_size: int, *, num_columns: int = 1) -> SamplingState:
    """Return the state of `num_slots` empty slots, of which steps draw up to `num_columns` tokens. `vocab_size` is the
    width of the logits.
    """
    empty = empty_extras(vocab_size)
    extras = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_slots, *leaf.shape)), empty)
    mask = jnp.broadcast_to(empty.allowed_mask, (num_slots, num_columns, len(empty.allowed_mask)))
    extras = dataclasses.replace(extras, allowed_mask=mask)
    return SamplingState(scalars=jnp.zeros((num_slots, NUM_SCALARS), jnp.int32), extras=extras)


def pack_scalars(request: EngineRequest) -> Int32[np.ndarray, " scalars"]:
    """Pack a request's scalars into one row of words, to be uploaded and passed to `admit`."""
    params = request.params
    row = np.zeros(NUM_SCALARS, np.int32)
    floats, words = row.view(np.float32), row.view(np.uint32)
    row[_COLUMNS["features"]] = features(request)
    for name, default in DEFAULTS.items():
        value = getattr(params, name)
        (row if name in _INTEGERS else floats)[_COLUMNS[name]] = default if is_neutral(name, value) else value
    floats[_COLUMNS["temperature"]] = 0.0 if params.is_greedy else max(params.temperature, MIN_TEMPERATURE)
    words[_COLUMNS["seed_low"]] = request.seed & 0xFFFFFFFF
    words[_COLUMNS["seed_high"]] = (request.seed >> 32) & 0xFFFFFFFF
    return row


def unpack_rows(state: SamplingState, slot_ids: Int32[Array, " B"]) -> RowParams:
    """Read the scalars of the rows' slots. Out-of-range slot ids, those of padding rows, read some slot's."""
    rows = state.scalars.at[slot_ids].get(mode="clip")

    def number(name: str) -> Array:
        column = rows[:, _COLUMNS[name]]
        return column if name in _INTEGERS else lax.bitcast_convert_type(column, jnp.float32)

    seed = rows[:, _COLUMNS["seed_low"] : _COLUMNS["seed_high"] + 1]
    return RowParams(
        features=rows[:, _COLUMNS["features"]],
        seed=lax.bitcast_convert_type(seed, jnp.uint32),
        numbers={name: number(name) for name in _PARAMETERS},
    )


def admit(state: SamplingState, slot_ids: Int32[Array, " A"], scalars: Int32[Array, "A scalars"]) -> SamplingState:
    """Write the scalars of newly admitted requests into their slots. Slot ids >= N are padding and dropped."""
    return dataclasses.replace(state, scalars=state.scalars.at[slot_ids].set(scalars, mode="drop"))


def pack_extras(request: EngineRequest, token_ids: Sequence[int], num_prompt_tokens: int, *, vocab_size: int) -> Extras:
    """Pack the processors' data of a request that gets a slot, in shapes that depend on V only.

    `token_ids` are all its tokens, beginning with the prompt: the counts are rebuilt from them after a preemption.
    """
    params = request.params
    extras = empty_extras(vocab_size)
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
    mask = jnp.broadcast_to(extras.allowed_mask, state.extras.allowed_mask.shape[1:])
    extras = dataclasses.replace(extras, allowed_mask=mask)
    admitted = jax.tree.map(lambda held, new: held.at[slot_id].set(new, mode="drop"), state.extras, extras)
    return dataclasses.replace(state, extras=admitted)


def empty_extras(vocab_size: int) -> Extras:
    """Return the extras of a request that needs none of them."""
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
