"""Log probabilities and ranks against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from jaxserve.sampling import token_logprobs

compute = jax.jit(token_logprobs, static_argnames="num_top")


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_matches_numpy(num_top):
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((9, 300)) * 4 + 50).astype(np.float32)
    tokens = rng.integers(0, 300, 9).astype(np.int32)
    tokens[0] = logits[0].argmax()
    got = compute(jnp.asarray(logits), jnp.asarray(tokens), num_top=num_top)
    want = log_softmax(logits.astype(np.float64), axis=1)
    order = np.argsort(-logits, axis=1, kind="stable")
    np.testing.assert_allclose(got.logprob, want[np.arange(9), tokens], rtol=1e-5)
    np.testing.assert_array_equal(got.rank, 1 + np.argmax(order == tokens[:, None], axis=1))
    np.testing.assert_array_equal(got.top_ids, order[:, :num_top])
    np.testing.assert_allclose(got.top_logprobs, np.take_along_axis(want, order[:, :num_top], axis=1), rtol=1e-5)
    assert got.rank[0] == 1


def test_ties_rank_by_id():
    logits = jnp.array([[1.0, 2.0, 2.0, 0.0, 2.0]] * 3)
    got = compute(logits, jnp.array([4, 1, 0], jnp.int32), num_top=4)
    assert list(got.rank) == [3, 1, 4]
    assert got.top_ids[0].tolist() == [1, 2, 4, 0]


def test_impossible_tokens_have_no_probability():
    logits = jnp.array([[0.0, -jnp.inf]])
    got = compute(logits, jnp.array([1], jnp.int32), num_top=2)
    assert got.logprob[0] == got.top_logprobs[0, 1] == -jnp.inf
    assert got.rank[0] == 2
