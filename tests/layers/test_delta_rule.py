"""Recurrences of matrices in chunks over ragged rows equals one token after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first
from interpreting import interpret
from naive import QUICK_TO_COMPILE

from jaxserve.layers import delta_rule
from jaxserve.layers.delta_rule import Rows, causal_convolution, recurrence
from pallas_kernels.recurrent_chunks import xla
from pallas_kernels.recurrent_step import Tokens, one_token, unit

H, G, K, V, SLOTS, WIDTH = 3, 2, 5, 7, 6, 4
CASES = {
    "chunks within and across rows": (50, {1: 3, 30: 0, 2: 4, 9: 7}, 8, ()),
    "all in one chunk": (50, {1: 3, 30: 0, 2: 4, 9: 7}, 64, ()),
    "some decays leave nothing": (50, {1: 3, 30: 0, 2: 4, 9: 7}, 64, (-1e5, -np.inf)),
    "no row of one token": (23, {20: 0, 3: 1}, 8, ()),
    "rows of one token alone": (5, {1: 4}, 4, ()),
}


def make_rows(lengths, contexts, rng):
    num_rows = len(lengths) + 2
    starts = np.full(num_rows + 1, sum(lengths), np.int32)
    starts[: len(lengths) + 1] = np.cumsum([0, *lengths])
    seq_lens, slots = np.zeros(num_rows, np.int32), np.full(num_rows, SLOTS, np.int32)
    seq_lens[: len(lengths)] = np.add(lengths, contexts)
    slots[: len(lengths)] = rng.permutation(SLOTS)[: len(lengths)]
    counts = jnp.int32(lengths.count(1)), jnp.int32(len(lengths))
    return Rows(jnp.asarray(slots), jnp.asarray(starts), jnp.asarray(seq_lens), *counts)


def draw_tokens(num_tokens, rng, log_decays=(), channels=()):
    """Draw tokens, of which every 25th or so has one of `log_decays`."""

    def normal(*shape):
        return jnp.asarray(rng.normal(size=(num_tokens, H, *shape)), jnp.float32)

    decay = -jnp.asarray(rng.exponential(0.3, size=(num_tokens, H, G, *channels)), jnp.float32)
    for index, log_decay in enumerate(log_decays):
        decay = decay.at[4 * index :: 25].set(log_decay)
    # Keys that are much alike, and strengths up to 2, are the hard case of the triangular system.
    alike = unit(normal(K) + 3 * jnp.ones((1, 1, K), jnp.float32))
    return Tokens(unit(normal(K)), alike, normal(G, V), decay, 2 * jax.nn.sigmoid(normal(G)))


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [16, 6], ids=["more tokens than rows", "fewer"])
def test_the_kernel_steps_rows_of_one_token_beside_longer_ones(capsys, num_tokens):
    """Results are those of XLA. States of rows that begin and of no row have NaN; the last rows are padding."""
    rng = np.random.default_rng(1)
    lengths, contexts = ([1, 1, 9], [3, 0, 4]) if num_tokens == 16 else ([1, 1, 2], [3, 0, 0])
    rows, states = make_rows(lengths, contexts, rng), rng.normal(size=(SLOTS, 1, G, 32, 16))
    rows = rows._replace(
        slots=jnp.pad(rows.slots, (0, 2), constant_values=SLOTS),
        query_starts=jnp.pad(rows.query_starts, (0, 2), mode="edge"),
        seq_lens=jnp.pad(rows.seq_lens, (0, 2)),
    )
    going_on = [int(slot) for slot, context in zip(rows.slots, contexts, strict=False) if context]
    states[[slot for slot in range(SLOTS) if slot not in going_on]] = np.nan
    sizes = (1, 32), (1, 32), (1, G, 16), (1, G), (1, G)
    q, k, v, decay, beta = (jnp.asarray(rng.normal(size=(num_tokens, *size)), jnp.float32) for size in sizes)
    arguments = Tokens(unit(q), unit(k), v, -jnp.abs(decay), beta), jnp.asarray(states, jnp.float32), rows

    def step(implementation):
        def run(*args):
            return recurrence(*args, corrects=True, is_decode_only=False, implementation=implementation)

        return jax.jit(run)

    got, want = interpret(capsys, step("sm90"), *arguments), step("xla")(*arguments)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert np.isfinite(got[0]).all()


RULES = {"delta rule": (True, ()), "decays by channel": (True, (K,)), "Mamba-2": (False, ())}


@pytest.mark.parametrize("rule", quick_first(RULES, 2))
@pytest.mark.parametrize(("num_tokens", "rows", "chunk_size", "log_decays"), CASES.values(), ids=CASES)
def test_chunks_equal_one_token_after_the_other(monkeypatch, num_tokens, rows, chunk_size, log_decays, rule):
    corrects, channels = RULES[rule]
    for size in ("CHUNK_SIZE", "CHUNK_SIZE_BY_CHANNEL"):
        monkeypatch.setattr(xla, size, chunk_size)
    monkeypatch.setattr(delta_rule, "MAX_ROWS_AT_ONCE", 2)
    monkeypatch.setattr(xla, "MAX_CHUNKS_AT_ONCE", 2)
    rng = np.random.default_rng(0)
    lengths = [*([1, 1, 1] if 1 in rows else []), *(length for length in rows if length > 1)]
    contexts = [*([3, 0, rows[1]] if 1 in rows else []), *(rows[length] for length in rows if length > 1)]
    batch, tokens = make_rows(lengths, contexts, rng), draw_tokens(num_tokens, rng, log_decays, channels)
    states = jnp.asarray(rng.normal(size=(SLOTS, H, G, K, V)), jnp.float32)
    inputs = jnp.asarray(rng.normal(size=(num_tokens, H, K)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(H, K, WIDTH)), jnp.float32)
    windows = jnp.asarray(rng.normal(size=(SLOTS, WIDTH - 1, H, K)), jnp.float32)

    @jax.jit(compiler_options=QUICK_TO_COMPILE)
    def step(tokens, states, inputs, windows, batch):
        return (
            *recurrence(tokens, states, batch, corrects=corrects, is_decode_only=False),
            *causal_convolution(inputs, weight, windows, batch, is_decode_only=False),
        )

    out, after, mixed, windows_after = map(np.asarray, step(tokens, states, inputs, windows, batch))
    one = jax.jit(one_token, static_argnames="corrects", compiler_options=QUICK_TO_COMPILE)
    expected_states, expected_windows = np.array(states), np.array(windows)
    for row, length in enumerate(lengths):
        slot, first = int(batch.slots[row]), int(batch.query_starts[row])
        state = jnp.asarray(expected_states[slot][None] * (contexts[row] > 0))
        seen = np.concatenate([expected_windows[slot] * (contexts[row] > 0), inputs[first : first + length]])
        for index in range(first, first + length):
            expected, state = one(state, Tokens(*(each[index : index + 1] for each in tokens)), corrects=corrects)
            np.testing.assert_allclose(out[index], expected[0], rtol=1e-4, atol=1e-5)
            summed = np.einsum("whc,hcw->hc", seen[index - first : index - first + WIDTH], weight)
            np.testing.assert_allclose(mixed[index], summed, rtol=1e-5, atol=1e-5)
        expected_states[slot], expected_windows[slot] = state[0], seen[-(WIDTH - 1) :]
    np.testing.assert_allclose(after, expected_states, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(windows_after, expected_windows, rtol=0, atol=0)
    assert np.isfinite(out).all()
