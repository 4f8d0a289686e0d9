"""N-gram lookup, against a search in Python; and counts of accepted drafts."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.speculative.ngram import NGram, append, lookup
from jaxserve.speculative.proposer import NewTokens
from jaxserve.speculative.verification import num_accepted, synthetic_num_accepted

SIZE = 24


def searched(text, *, k, min_n, max_n):
    """Return what `lookup` should, or None."""
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(text) - 2, n - 2, -1):
            if n <= len(text) and text[end - n + 1 : end + 1] == text[-n:]:
                following = text[end + 1 :]
                return [following[i % len(following)] for i in range(k)]
    return None


@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=SIZE), min_size=3, max_size=3),
    behind=st.integers(0, 2),
    bounds=st.sampled_from([(1, 1), (1, 3), (2, 4), (3, 3)]),
)
def test_the_latest_of_the_longest_matches(texts, behind, bounds):
    history = np.full((3, SIZE), behind, np.int32)  # what an earlier request has left
    for row, text in zip(history, texts, strict=True):
        row[: len(text)] = text
    lengths = jnp.array([len(text) for text in texts], jnp.int32)
    options = {"k": 4, "min_n": bounds[0], "max_n": bounds[1]}
    drafts, is_found = lookup(jnp.asarray(history), lengths, **options)
    for text, draft, found in zip(texts, drafts.tolist(), is_found.tolist(), strict=True):
        assert (draft if found else None) == searched(text, **options)


def test_tokens_are_appended_to_the_rows_that_drew_some():
    proposer = NGram(num_drafts=2, min_n=1, max_n=2)
    state = proposer.init_state(num_slots=3, max_length=8)
    # In pieces of three, the last one padded; a slot out of range.
    pieces = jnp.array([[5, 6, 7], [5, 0, 0], [9, 9, 9]], jnp.int32)
    state = proposer.admit(state, jnp.array([2, 2, 3], jnp.int32), jnp.array([0, 3, 0], jnp.int32), pieces)
    assert state.tolist() == [[0] * 8, [0] * 8, [5, 6, 7, 5, 0, 0, 0, 0]]
    new = NewTokens(
        slots=jnp.array([2, 3], jnp.int32),
        token_ids=jnp.array([[6, 9, 9], [1, 1, 1]], jnp.int32),
        counts=jnp.array([1, 0], jnp.int32),
        lengths=jnp.array([4, 0], jnp.int32),
    )
    state, drafts, counts = proposer.propose(state, new)
    assert state.tolist() == [[0] * 8, [0] * 8, [5, 6, 7, 5, 6, 0, 0, 0]]
    assert (drafts[0].tolist(), int(counts[0])) == ([7, 5], 2)
    full = append(jnp.zeros((1, 4), jnp.int32), NewTokens(*(jnp.array(x) for x in ([0], [[1, 2, 3]], [3], [2]))))
    assert full.tolist() == [[0, 0, 1, 2]]  # what is behind the end is dropped


@given(st.lists(st.integers(0, 1), min_size=3, max_size=3), st.integers(0, 3))
def test_drafts_count_up_to_the_first_that_was_not_drawn(is_right, num_drafts):
    drawn = jnp.array([[4, 5, 6, 7]], jnp.int32)
    drafts = jnp.where(jnp.array([is_right]) == 1, drawn[:, :-1], 0)
    expected = next((i for i, right in enumerate(is_right[:num_drafts]) if not right), num_drafts)
    assert num_accepted(drawn, drafts, jnp.array([num_drafts], jnp.int32)).tolist() == [expected]


@pytest.mark.parametrize("rates", [(1.0, 0.5, 0.0), (0.7, 0.7, 0.2)])
def test_synthetic_acceptance_has_its_rates(rates):
    size = 4000
    seed = jnp.zeros((size, 2), jnp.uint32)
    counters, num_drafts = jnp.arange(size, dtype=jnp.int32), jnp.full(size, 3, jnp.int32)
    counts = np.asarray(synthetic_num_accepted(seed, counters, num_drafts, jnp.array(rates)))
    np.testing.assert_allclose([(counts > i).mean() for i in range(3)], rates, atol=0.03)
    assert synthetic_num_accepted(seed, counters, jnp.ones(size, jnp.int32), jnp.ones(2)).tolist() == [1] * size
