"""Thresholds and draws at the sizes of real vocabularies, where float32 sums and ties begin to matter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sampling.xla import draw_by_weight, filter_weights


@jax.jit
def kept(distance, top_k, top_p, min_p):
    return filter_weights(distance, top_k=top_k, top_p=top_p, min_p=min_p) > 0


def distances(logits):
    return jnp.asarray(logits.max(axis=1, keepdims=True) - logits)


def kept_by(logits, *, top_k=0, top_p=1.0):
    every_row = jnp.ones(len(logits), jnp.float32)
    return np.asarray(kept(distances(logits), top_k * every_row.astype(jnp.int32), top_p * every_row, 0.0 * every_row))


@pytest.mark.parametrize("top_k", [1, 2, 50, 3000])
def test_top_k_is_exact_and_keeps_ties(top_k):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((3, 3000)).astype(np.float32)
    logits[1] = np.round(logits[1], 1)  # many ties
    logits[2] = 0
    threshold = np.sort(logits, axis=1)[:, -top_k][:, None]
    np.testing.assert_array_equal(kept_by(logits, top_k=top_k), logits >= threshold)


@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.99, 0.9999])
def test_top_p_keeps_the_smallest_sufficient_set(scale, top_p):
    """Up to float32 rounding: never a set with less than the required probability, never one token more than needed."""
    logits = (np.random.default_rng(1).standard_normal((4, 128_256)) * scale).astype(np.float32)
    got = kept_by(logits, top_p=top_p)
    p = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    for row, is_kept in zip(p, got, strict=True):
        assert row[is_kept].min() >= row[~is_kept].max(initial=0)
        mass = row[is_kept].sum()
        assert mass > top_p - 2e-6
        assert mass - row[is_kept].min() < top_p + 2e-6


@pytest.mark.slow
def test_draws_follow_the_weights_into_the_tail():
    """Half of the mass is spread over the last 200,000 of 256,000 tokens, each far below the step of a float32 uniform
    over the whole: their fraction, and the evenness within it, must come out right.
    """
    vocab_size, num_draws = 256_000, 256
    weights = np.full(vocab_size, 1e-9, np.float32)
    weights[:2] = 1.0, 3.0
    weights[56_000:] = 4.0 / 200_000
    uniform = np.random.default_rng(2).random((40 * num_draws, 2), np.float32)
    draw = jax.jit(draw_by_weight)
    tiled = jnp.broadcast_to(jnp.asarray(weights)[None], (num_draws, vocab_size))
    drawn = np.concatenate(
        [np.asarray(draw(tiled, uniform[i : i + num_draws])) for i in range(0, len(uniform), num_draws)]
    )
    n = len(drawn)
    for tokens, share in ((drawn == 0, 0.125), (drawn == 1, 0.375), (drawn >= 56_000, 0.5), (drawn >= 156_000, 0.25)):
        assert abs(tokens.mean() - share) < 4 * np.sqrt(share * (1 - share) / n)
    tail = drawn[drawn >= 56_000]
    assert len(np.unique(tail)) > 0.97 * len(tail)


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-24])
def test_tokens_without_weight_are_never_drawn(u):
    weights = np.zeros((4, 2000), np.float32)
    weights[0, [0, 1999]] = 1.0, 1e-30
    weights[1, 700] = 1e-37
    weights[2, 511:514] = 0.1
    weights[3, ::2] = np.random.default_rng(3).random(1000, np.float32)
    got = np.asarray(jax.jit(draw_by_weight)(weights, jnp.full((4, 2), u, jnp.float32)))
    assert (weights[np.arange(4), got] > 0).all()
