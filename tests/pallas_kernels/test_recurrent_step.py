"""The step of a recurrence against float64, in every implementation that runs here; compiled for an H200, too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first
from interpreting import interpret

from pallas_kernels.deviceless import compile_for_h200
from pallas_kernels.recurrent_step import Mixed, Tokens, recurrent_step, why_not

SHAPES = {"Gated DeltaNet": (2, 1, 128, 128), "Mamba-2": (1, 2, 128, 64), "80 values": (1, 1, 32, 80)}
"""H, G, K and V: parts of 64, 64 and 16 columns."""


def make_case(shape, *, num_slots=6):
    """Return tokens of four rows: one begins where a state has NaN, the last one is padding; and the slots."""
    H, G, K, V = shape
    rng = np.random.default_rng(K + V)
    q, k, v = (rng.standard_normal(size) for size in ((4, H, K), (4, H, K), (4, H, G, V)))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    decay, beta = -rng.exponential(0.3, (4, H, G)), rng.uniform(0, 2, (4, H, G))
    tokens = Tokens(*(jnp.asarray(x, jnp.float32) for x in (q, k, v, decay, beta)))
    states = rng.standard_normal((num_slots, H, G, K, V))
    states[3] = np.nan
    slots, begins = jnp.asarray([4, 3, 0, num_slots], jnp.int32), jnp.asarray([False, True, False, False])
    return tokens, jnp.asarray(states, jnp.float32), slots, begins


def check(got, tokens, states, slots, begins, *, corrects):
    out, after = map(np.asarray, got)
    assert np.isfinite(out).all()
    q, k, v, log_decay, beta = (np.asarray(x).astype(np.float64) for x in tokens)
    want = np.asarray(states).astype(np.float64)
    for row, slot in enumerate(slots[:-1]):
        state = np.zeros(want.shape[1:]) if begins[row] else want[slot] * np.exp(log_decay[row])[..., None, None]
        delta = v[row] - np.einsum("hk,hgkv->hgv", k[row], state) * corrects
        want[slot] = state + np.einsum("hk,hgv->hgkv", k[row], delta * beta[row][..., None])
        np.testing.assert_allclose(out[row], np.einsum("hk,hgkv->hgv", q[row], want[slot]), rtol=0, atol=2e-6)
    np.testing.assert_allclose(after, want, rtol=0, atol=2e-6)


def run(capsys, *arguments, implementation, **options):
    """Run a step, interpreted where there is no GPU for its kernel."""
    call = jax.jit(functools.partial(recurrent_step, implementation=implementation, **options))
    is_interpreted = implementation == "sm90" and jax.default_backend() != "gpu"
    return interpret(capsys, call, *arguments) if is_interpreted else call(*arguments)


@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize("implementation", ["xla", "sm90"])
@pytest.mark.parametrize("shape", quick_first(SHAPES))
def test_step(capsys, shape, implementation, corrects):
    case = make_case(SHAPES[shape])
    check(run(capsys, *case, implementation=implementation, corrects=corrects), *case, corrects=corrects)


def make_mixed(num_rows, shape):
    """Return what tokens are made of; rates are small and large, and of one row exp overflows."""
    H, G, K, V = shape
    rng = np.random.default_rng(V)
    heads = rng.standard_normal((num_rows, H, 2 * K + G * V))
    heads[0, 0, :K] = 0
    rates = rng.choice([-100, -30, -17, -1, 0, 1, 30, 100], (num_rows, H, 2 * G))
    a_log, dt_bias = rng.normal(size=(H, G)), rng.normal(size=(H, G))
    arrays = {"heads": heads, "rates": rates, "a_log": a_log, "dt_bias": dt_bias}
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    return Mixed(**arrays, key_size=K, max_beta=2.0)


@pytest.mark.parametrize("implementation", ["xla", "sm90"])
@pytest.mark.parametrize("shape", quick_first(SHAPES))
def test_tokens_made_by_the_kernel(capsys, shape, implementation):
    _, states, slots, begins = make_case(SHAPES[shape])
    mixed = make_mixed(4, SHAPES[shape])
    got = run(capsys, mixed, states, slots, begins, implementation=implementation, corrects=True)
    check(got, mixed.tokens(), states, slots, begins, corrects=True)


@pytest.mark.parametrize("implementation", ["xla", "sm90"])
@pytest.mark.parametrize(("shape", "corrects"), quick_first([("Gated DeltaNet", True), ("80 values", False)]))
def test_rows_of_several_tokens(capsys, shape, implementation, corrects):
    """Outputs are those of one token after the other; states change by the tokens that count, or not at all."""
    H, G, K, V = SHAPES[shape]
    _, states, slots, begins = make_case(SHAPES[shape])
    rng, num_columns = np.random.default_rng(0), 3
    sizes = (H, K), (H, K), (H, G, V), (H, G), (H, G)
    q, k, v, decay, beta = (jnp.asarray(rng.normal(size=(4, num_columns, *size)), jnp.float32) for size in sizes)
    tokens = Tokens(q, k / jnp.linalg.norm(k, axis=-1, keepdims=True), v, -jnp.abs(decay), jnp.abs(beta))
    counts = jnp.asarray([2, 3, 0, 1], jnp.int32)
    outs, after, counted = [], states, states
    for column in range(num_columns):
        token, first = Tokens(*(x[:, column] for x in tokens)), begins & (column == 0)
        out, after = recurrent_step(token, after, slots, first, corrects=corrects)
        here = jnp.where(column < counts, slots, len(states))
        _, counted = recurrent_step(token, counted, here, first, corrects=corrects)
        outs.append(out)
    flat = Tokens(*(x.reshape(-1, *x.shape[2:]) for x in tokens))
    for given, changes, expected in (((), True, after), ((counts,), True, counted), ((), False, states)):
        options = {"corrects": corrects, "changes": changes, "implementation": implementation}
        out, got = run(capsys, flat, states, slots, begins, *given, **options)
        np.testing.assert_allclose(got, expected, rtol=0, atol=5e-6)
        out = np.asarray(out).reshape(4, num_columns, H, G, V)
        assert np.isfinite(out).all()
        for row, count in enumerate(counts[:3] if given else [num_columns] * 3):
            np.testing.assert_allclose(out[row, :count], np.stack(outs, axis=1)[row, :count], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "corrects", "is_mixed"),
    quick_first(
        [
            ((16, 2, 128, 128), True, True),
            ((8, 16, 128, 64), False, False),
            ((16, 2, 128, 128), True, False),
            ((8, 16, 128, 80), False, False),
            ((2, 12, 256, 64), False, False),
        ],
        2,
    ),
)
def test_on_an_h200_states_are_changed_in_place_without_spills(shape, corrects, is_mixed):
    num_rows, (H, G, K, V) = 64, shape
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    keys, rates, states = array((num_rows, H, K)), array((num_rows, H, G)), array((70, *shape))
    tokens = Tokens(keys, keys, array((num_rows, H, G, V)), rates, rates)
    if is_mixed:
        tokens = jax.eval_shape(lambda: make_mixed(num_rows, shape))
    slots, begins = (array((num_rows,)).update(dtype=dtype) for dtype in (jnp.int32, jnp.bool))

    def layers(states, *rows):
        first, states = recurrent_step(rows[0], states, *rows[1:], corrects=corrects, implementation="sm90")
        return first, recurrent_step(rows[0], states, *rows[1:], corrects=corrects, implementation="sm90")

    program = compile_for_h200(layers, states, tokens, slots, begins, donate_argnums=(0,))
    assert program.spill_bytes == 0
    assert program.copies_of(states.shape) == []
    assert len(program.kernels) == 1
    assert program.temp_bytes < 2**20


@pytest.mark.parametrize(("shape", "corrects"), quick_first([((16, 2, 128, 128), True), ((8, 16, 128, 64), False)]))
def test_on_an_h200_drafts_are_verified_without_copies_of_states(shape, corrects):
    num_rows, num_columns, (H, G, K, V) = 12, 5, shape
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    keys, rates = (array((num_rows * num_columns, *size)) for size in ((H, K), (H, G)))
    values, states = array((num_rows * num_columns, H, G, V)), array((70, *shape))
    rows = [array((num_rows,)).update(dtype=dtype) for dtype in (jnp.int32, jnp.bool, jnp.int32)]

    def verify(states, tokens, slots, begins, counts):
        step = functools.partial(recurrent_step, corrects=corrects, implementation="sm90")
        out, _ = step(tokens, states, slots, begins, changes=False)
        return out, step(tokens, states, slots, begins, counts)[1]

    program = compile_for_h200(verify, states, Tokens(keys, keys, values, rates, rates), *rows, donate_argnums=(0,))
    assert program.spill_bytes == 0
    assert program.copies_of(states.shape) == []
    assert len(program.kernels) == 2
    assert program.temp_bytes < 2**20 + 4 * values.size  # outputs that nobody reads


@pytest.mark.parametrize(("key_size", "value_size"), [(128, 24), (20, 64), (1024, 64)])
def test_what_the_kernel_cannot_do(key_size, value_size):
    assert f"got {key_size} and {value_size}" in why_not(key_size, value_size)
    case = make_case((1, 1, key_size, value_size))
    with pytest.raises(NotImplementedError, match=f"got {key_size} and {value_size}"):
        recurrent_step(*case, corrects=True, implementation="sm90")


@pytest.mark.parametrize("sizes", [(128, 128), (256, 64), (128, 80), (96, 192), (64, 96)])
def test_sizes_of_published_models(sizes):
    assert why_not(*sizes) is None
