"""The Hopper sampling kernel: interpreted on a CPU with race detection, compiled for an H200 without one, and run on
one if there is one. A row of many draws shows the set of tokens that its filters keep.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first
from interpreting import interpret
from scipy import stats

from pallas_kernels.deviceless import compile_for_h200
from pallas_kernels.sampling import sample
from pallas_kernels.sampling.reference import draw, kept_weights
from pallas_kernels.sampling.sm90 import sample_sm90

PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
ROWS = [
    {"temperature": 0.0, "top_k": 5},
    {},
    {"temperature": 1e-6, "top_k": 3, "top_p": 0.9},
    {"temperature": 50.0},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 10**9},
    {"top_p": 1e-6},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 1000, "top_p": 0.5},
]


SHIFTS = [(first, second) for first in (-1e-5, 1e-5) for second in (-1e-5, 1e-5)]


def make_logits(rng, num_rows, vocab_size, *, grid=None, masked=0.0):
    """Return normal logits; on a `grid` of values there are ties, and a fraction may be `masked`."""
    logits = (3 * rng.standard_normal((num_rows, vocab_size))).astype(np.float32)
    if grid is not None:
        logits = np.round(logits / grid).astype(np.float32) * np.float32(grid)
    logits[rng.random(logits.shape) < masked] = -np.inf
    return logits


def columns(rows):
    dtypes = {"temperature": jnp.float32, "top_k": jnp.int32, "top_p": jnp.float32, "min_p": jnp.float32}
    return {name: jnp.asarray([(PLAIN | row)[name] for row in rows], dtype) for name, dtype in dtypes.items()}


def check(tokens, logits, rows, uniform):
    """Check that tokens equal the definition's, or are adjacent to it where float32 may round across an edge between
    tokens.
    """
    num_beside = 0
    for token, x, row, u in zip(np.asarray(tokens).tolist(), logits, rows, uniform, strict=True):
        row = PLAIN | row
        if row["temperature"] == 0:
            assert token == x.argmax()
            continue
        weights = kept_weights(x, **row)
        assert weights[token] > 0, row
        if token != draw(weights, u):
            num_beside += 1
            around = [draw(weights, np.clip(u + np.array([first, second]), 0, 1 - 1e-9)) for first, second in SHIFTS]
            assert min(around) <= token <= max(around), row
    assert num_beside <= len(rows) // 100


@pytest.mark.slow
def test_interpreted(capsys):
    """Everything in one batch, with a vocabulary of no round size; then a vocabulary smaller than a tile."""
    rng = np.random.default_rng(0)
    rows = [ROWS[i] for i in (0, 1, 2, 8, 12)] + [{}]
    for vocab_size in (1333, 77):
        logits = make_logits(rng, len(rows), vocab_size, grid=0.25, masked=0.2)
        logits[-1] = np.nan
        uniform = rng.random((len(rows), 2), np.float32)
        run = functools.partial(sample_sm90, **columns(rows), uniform=jnp.asarray(uniform), interpret=True)
        tokens, maximum = interpret(capsys, run, jnp.asarray(logits))
        np.testing.assert_array_equal(maximum, logits.max(axis=1))
        check(tokens[:-1], logits[:-1], rows[:-1], uniform[:-1])
        assert tokens[-1] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "vocab_size"), quick_first([(1, 512), (32, 50_257), (64, 128_256), (256, 262_208)])
)
def test_compiles_without_spilling(num_rows, vocab_size):
    """With clusters of 8, 4, 2 and 1 CTAs."""
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in columns([{}] * num_rows).items()}
    program = compile_for_h200(
        lambda logits, columns: sample(logits, **columns, implementation="sm90"),
        jax.ShapeDtypeStruct((num_rows, vocab_size), jnp.float32),
        shapes | {"uniform": jax.ShapeDtypeStruct((num_rows, 2), jnp.float32)},
    )
    [kernel] = program.kernels
    assert kernel.spill_bytes == 0
    assert not program.copies_of((num_rows, vocab_size))
    assert program.temp_bytes < 2**20


run = jax.jit(sample, static_argnames="implementation")
needs_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("kind", [{}, {"grid": 0.25}, {"grid": 0.25, "masked": 0.999}, {"masked": 0.3}], ids=str)
@pytest.mark.parametrize("vocab_size", [5, 512, 513, 32_000, 50_257, 128_256, 151_936, 262_144, 262_208])
def test_on_a_gpu(vocab_size, kind):
    """Every kind of row, 16 draws each, together with all others; a row's tokens do not depend on those."""
    rng = np.random.default_rng(vocab_size)
    rows = ROWS * 16
    logits = make_logits(rng, len(ROWS), vocab_size, **kind)
    logits[:, 0] = 0.25  # something is left
    logits = np.tile(logits, (16, 1))
    uniform = rng.random((len(rows), 2), np.float32)
    arguments = columns(rows) | {"uniform": jnp.asarray(uniform)}
    tokens, maximum = run(jnp.asarray(logits), **arguments, implementation="sm90")
    np.testing.assert_array_equal(maximum, logits.max(axis=1))
    check(tokens, logits, rows, uniform)
    some = np.arange(3, len(rows), 29)
    arguments = {name: x[some] for name, x in arguments.items()}
    again, _ = run(jnp.asarray(logits[some]), **arguments, implementation="sm90")
    np.testing.assert_array_equal(again, tokens[some])


@needs_gpu
def test_rows_without_a_distribution():
    logits = make_logits(np.random.default_rng(0), 5, 1000)
    logits[0, 7] = np.nan
    logits[1] = -np.inf
    logits[2, 9] = np.inf
    logits[3, :-1] = -np.inf
    rows = [{"top_p": 0.9}, {"top_k": 3}, {}, {"top_k": 3, "top_p": 0.5}, {}]
    uniform = np.full((5, 2), 0.5, np.float32)
    tokens, _ = run(jnp.asarray(logits), **columns(rows), uniform=jnp.asarray(uniform), implementation="sm90")
    assert np.asarray(tokens)[:4].tolist() == [0, 0, 0, 999]
    check(tokens[4:], logits[4:], rows[4:], uniform[4:])


@needs_gpu
def test_frequencies_on_a_gpu():
    """20,000 draws from one filtered distribution, by chi-square."""
    rng = np.random.default_rng(1)
    row = {"temperature": 0.9, "top_k": 200, "top_p": 0.95}
    logits = make_logits(rng, 1, 32_000)
    wanted = kept_weights(logits[0], **(PLAIN | row))
    num_draws, batch = 20_000, 500
    tiled = jnp.asarray(np.tile(logits, (batch, 1)))
    drawn = [
        np.asarray(
            run(
                tiled,
                **columns([row] * batch),
                uniform=jnp.asarray(rng.random((batch, 2), np.float32)),
                implementation="sm90",
            )[0]
        )
        for _ in range(num_draws // batch)
    ]
    observed = np.bincount(np.concatenate(drawn), minlength=len(wanted))
    assert not observed[wanted == 0].any()
    is_kept = wanted > 0
    assert stats.chisquare(observed[is_kept], num_draws * wanted[is_kept] / wanted.sum()).pvalue > 1e-4
