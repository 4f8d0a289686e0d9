"""Chunks of a recurrence by the Hopper kernels equal one token after the other, interpreted; compiled for an H200."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first
from interpreting import interpret

from pallas_kernels.deviceless import compile_for_h200
from pallas_kernels.recurrent_chunks import MAX_BYTES, recurrent_chunks_sm90, why_not
from pallas_kernels.recurrent_step import Tokens, one_token

SLOTS = 5
SHAPES = {"two tiles of keys": (1, 2, 128, 64), "two parts of values": (1, 1, 64, 128)}
LOG_DECAYS = {"some leave nothing": (-1e5, -np.inf), "weak decays": ()}
LENGTHS = 1, 70, 3, 129, 1
CONTEXTS = 4, 0, 9, 5, 0


def make_case(shape, log_decays):
    """Return tokens of a row of one token, of some with several, and of padding; states, slots and the rest."""
    H, G, K, V = shape
    rng = np.random.default_rng(K)
    num_tokens = sum(LENGTHS) + 2
    alike = 3 * np.ones((1, 1, K))  # the hard case of the triangular system, as are strengths up to 2
    q, k = (rng.normal(size=(num_tokens, H, K)) + x for x in (0, alike))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    decay = -rng.exponential(0.3, (num_tokens, H, G))
    for index, log_decay in enumerate(log_decays):
        decay[4 * index :: 25] = log_decay
    tokens = q, k, rng.normal(size=(num_tokens, H, G, V)), decay, rng.uniform(0, 2, (num_tokens, H, G))
    for x in tokens:
        x[-2:] = np.nan  # padding behind rows, whose chunks reach into it
    states = rng.normal(size=(SLOTS, *shape))
    states[2] = np.nan  # of the row of 70 tokens, which begins
    slots = np.asarray([4, 2, 0, 3, SLOTS, SLOTS], np.int32)
    starts = np.cumsum([0, *LENGTHS, 0], dtype=np.int32)
    begins = np.asarray([*(context == 0 for context in CONTEXTS), False])
    tokens = Tokens(*(jnp.asarray(x, jnp.float32) for x in tokens))
    return tokens, jnp.asarray(states, jnp.float32), slots, starts, begins


def expected(tokens, states, slots, starts, begins, *, corrects):
    """Return the outputs of all rows but the first, and the states after them."""
    one = jax.jit(functools.partial(one_token, corrects=corrects))
    out, states = np.zeros(tokens.v.shape, np.float32), np.array(states)
    for row in range(1, len(LENGTHS)):
        has_slot = slots[row] < SLOTS
        state = jnp.asarray(states[slots[row]][None]) if has_slot and not begins[row] else jnp.zeros_like(states[:1])
        for index in range(starts[row], starts[row + 1]):
            out[index], state = one(state, Tokens(*(each[index : index + 1] for each in tokens)))
        if has_slot:
            states[slots[row]] = state[0]
    return out, states


@pytest.mark.parametrize("log_decays", quick_first(LOG_DECAYS))
@pytest.mark.parametrize("corrects", quick_first([True, False]), ids=["delta rule", "Mamba-2"])
@pytest.mark.parametrize(("shape", "has_turns"), quick_first([*zip(SHAPES, (True, False), strict=True)]))
def test_chunks_equal_one_token_after_the_other(capsys, shape, has_turns, corrects, log_decays):
    case = make_case(SHAPES[shape], LOG_DECAYS[log_decays])
    max_bytes = 2**18 if has_turns else MAX_BYTES
    run = functools.partial(recurrent_chunks_sm90, corrects=corrects, max_bytes=max_bytes, interpret=True)
    out, states = interpret(capsys, run, *case, jnp.int32(1), jnp.int32(len(LENGTHS)))
    for got, want in zip((out, states), expected(*case, corrects=corrects), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=3e-4)


@pytest.mark.parametrize(
    ("shape", "corrects"),
    quick_first([((16, 2, 128, 128), True), ((8, 16, 128, 64), False), ((4, 1, 64, 64), True)]),
)
def test_on_an_h200_states_are_changed_in_place_without_spills(shape, corrects):
    num_tokens, num_rows, (H, G, K, V) = 8192, 256, shape
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    keys, rates = array((num_tokens, H, K)), array((num_tokens, H, G))
    tokens, states = Tokens(keys, keys, array((num_tokens, H, G, V)), rates, rates), array((270, *shape))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    rows = (jax.ShapeDtypeStruct(size, jnp.int32) for size in ((num_rows,), (num_rows + 1,)))
    rows = (*rows, jax.ShapeDtypeStruct((num_rows,), jnp.bool), number, number)

    def layers(states, *rows):
        first, states = recurrent_chunks_sm90(rows[0], states, *rows[1:], corrects=corrects)
        return first, recurrent_chunks_sm90(rows[0], states, *rows[1:], corrects=corrects)

    program = compile_for_h200(layers, states, tokens, *rows, donate_argnums=(0,))
    assert program.spill_bytes == 0
    assert program.copies_of(states.shape) == []
    assert len(program.kernels) == 2
    assert program.temp_bytes < 1.2 * MAX_BYTES + 8 * num_tokens * H * (2 * K + G * V)


@pytest.mark.parametrize(("key_size", "value_size"), [(128, 80), (256, 64), (96, 64)])
def test_what_the_kernels_cannot_do(key_size, value_size):
    assert f"got {key_size} and {value_size}" in why_not(key_size, value_size)
    with pytest.raises(NotImplementedError, match=f"got {key_size} and {value_size}"):
        recurrent_chunks_sm90(*make_case((1, 1, key_size, value_size), ()), 1, 2, corrects=True)
