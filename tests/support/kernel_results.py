"""Results of kernels beside what they should be, in float64."""

import jax
import jax.numpy as jnp
import numpy as np


def in_float(tree):
    """Return arrays in float64."""
    return jax.tree.map(lambda x: np.asarray(x.astype(jnp.float32), np.float64), tree)


def silu(x):
    return x / (1 + np.exp(-x))


def relative_error(got, want):
    """Return the norm of the error, relative to that of the result."""
    assert got.shape == want.shape
    return np.linalg.norm(in_float(got) - want) / np.linalg.norm(want)


def check_rows(got, want, tolerance):
    """Fail unless all rows together are near, and each of them, which may be three times as far."""
    assert got.shape == want.shape
    errors, sizes = (np.linalg.norm(x, axis=1) for x in (in_float(got) - want, want))
    assert np.linalg.norm(errors) <= tolerance * np.linalg.norm(sizes), f"wrong result: {errors / sizes}"
    assert (errors <= 3 * tolerance * sizes).all(), f"wrong result: {errors / sizes}"


def check_tokens(got, want, tolerance):
    """Fail unless the heads of all tokens together are near, and those of each, which may be twice as far; of tokens
    without a result they must be 0.
    """
    got = in_float(got)
    is_zero = (want == 0).all(axis=(1, 2))
    assert not got[is_zero].any(), "wrong result: tokens without one"
    for token in np.flatnonzero(~is_zero):
        error = np.linalg.norm(got[token] - want[token]) / np.linalg.norm(want[token])
        assert error <= 2 * tolerance, f"wrong result: token {token}: {error}"
    error = np.linalg.norm(got - want)
    assert error <= tolerance * np.linalg.norm(want), f"wrong result: {error} of {np.linalg.norm(want)}"
