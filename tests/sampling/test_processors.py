"""Each logits processor against plain NumPy, in fresh slots and in used ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_harness import EVERYTHING, NUM_SLOTS, VOCAB, ints, jit_record, make_request, put, union

from jaxserve.sampling import Feature, init_state
from jaxserve.sampling.processors import process
from jaxserve.sampling.state import unpack_rows


@jax.jit
def jit_process(logits, state, slot_ids, num_output_tokens, features):
    return process(
        logits,
        unpack_rows(state, slot_ids),
        state.extras,
        slot_ids=slot_ids,
        columns=jnp.zeros_like(slot_ids),
        num_output_tokens=num_output_tokens,
        features=features,
    )


def processed(request, logits, output=(), *, history=()):
    """Return the logits that a request in slot 2 of a used state would be sampled from."""
    state = init_state(NUM_SLOTS, VOCAB)
    for earlier in history:
        state = put(state, 2, earlier, output=range(30))
    state = put(state, 2, request, output)
    got = jit_process(jnp.asarray(logits)[None], state, ints(2), ints(len(output)), union(request, *history))
    return np.asarray(got[0])


@pytest.fixture
def logits():
    return np.random.default_rng(0).standard_normal(VOCAB).astype(np.float32) * 3


OUTPUT = (3, 3, 4, 3, 76)


def penalized(logits, *, repetition=1.0, frequency=0.0, presence=0.0):
    want = logits.astype(np.float64)
    for token in {5, 6, *OUTPUT}:
        want[token] = want[token] / repetition if want[token] > 0 else want[token] * repetition
    for token in set(OUTPUT):
        want[token] -= frequency * OUTPUT.count(token) + presence
    return want


@pytest.mark.parametrize("history", [(), (EVERYTHING,)], ids=["fresh slot", "used slot"])
class TestProcessors:
    @pytest.mark.parametrize(
        "values",
        [
            {"repetition": 1.7},
            {"repetition": 0.4},
            {"frequency": 0.7},
            {"presence": -1.5},
            {"repetition": 1.3, "frequency": 0.25, "presence": 0.5},
        ],
        ids=str,
    )
    def test_penalties(self, logits, history, values):
        request = make_request((5, 6, 5), **{f"{name}_penalty": value for name, value in values.items()})
        got = processed(request, logits, OUTPUT, history=history)
        np.testing.assert_allclose(got, penalized(logits, **values), rtol=1e-6, atol=1e-6)

    def test_logit_bias(self, logits, history):
        bias = {0: 1.5, 31: -100.0, VOCAB - 1: 100.0, VOCAB: 7.0, 10**6: 7.0}
        want = logits.copy()
        want[[0, 31, VOCAB - 1]] += [1.5, -100.0, 100.0]
        got = processed(make_request(logit_bias=bias), logits, history=history)
        np.testing.assert_allclose(got, want, rtol=1e-6)

    def test_allowed_tokens(self, logits, history):
        allowed = [0, 31, 32, VOCAB - 1, VOCAB, VOCAB + 32]
        want = np.full(VOCAB, -np.inf, np.float32)
        want[allowed[:4]] = logits[allowed[:4]]
        got = processed(make_request(allowed_token_ids=allowed), logits, history=history)
        np.testing.assert_array_equal(got, want)

    @pytest.mark.parametrize(
        ("output", "banned"),
        [
            ((), {3}),
            ((7,), {3}),
            ((7, 8), {3, 9}),
            ((7, 8, 9), {3}),
            ((1, 7, 8), {3, 9}),
            ((8, 7), {3}),
            (tuple(range(20, 27)), {3, 27}),
            ((5, *range(20, 27)), {3, 27}),
            (tuple(range(21, 27)), {3}),
        ],
        ids=str,
    )
    def test_bad_words(self, logits, history, output, banned):
        words = ((3,), (7, 8, 9), tuple(range(20, 28)), (7, VOCAB), (-1,), ())
        want = logits.copy()
        want[list(banned)] = -np.inf
        got = processed(make_request(bad_word_ids=words), logits, output, history=history)
        np.testing.assert_array_equal(got, want)

    @pytest.mark.parametrize("num_output_tokens", [0, 4, 5, 6])
    def test_min_tokens(self, logits, history, num_output_tokens):
        stops = {0, 40, VOCAB - 1, VOCAB, -1}
        want = logits.copy()
        if num_output_tokens < 5:
            want[[0, 40, VOCAB - 1]] = -np.inf
        request = make_request(stop_token_ids=stops, min_tokens=5, max_tokens=9)
        got = processed(request, logits, range(num_output_tokens), history=history)
        np.testing.assert_array_equal(got, want)

    @pytest.mark.parametrize("n", [0.3, 1.0, 100.0, 0.0, -0.5])
    @pytest.mark.parametrize("others", [{}, {"allowed_token_ids": range(40, 60), "logit_bias": {41: 9.0}}], ids=str)
    def test_top_n_sigma(self, logits, history, others, n):
        """The deviation is that of what other processors leave, to which a grammar's mask belongs."""
        before = processed(make_request(**others), logits, history=history).astype(np.float64)
        unmasked = before[before > -np.inf]
        want = np.where(before >= unmasked.max() - n * unmasked.std(), before, -np.inf) if n > 0 else before
        got = processed(make_request(top_n_sigma=n, **others), logits, history=history)
        np.testing.assert_allclose(got, want, rtol=1e-6)

    def test_nothing_asked_for(self, logits, history):
        np.testing.assert_array_equal(processed(make_request(), logits, history=history), logits)

    def test_all_together(self, logits, history):
        request = make_request(
            (5, 6),
            stop_token_ids=(11,),
            bad_word_ids=((76, 12),),
            repetition_penalty=1.5,
            frequency_penalty=0.5,
            logit_bias={3: 4.0, 40: 4.0},
            allowed_token_ids=[3, 11, 12, 13, 76],
            min_tokens=6,
            max_tokens=9,
        )
        want = np.full(VOCAB, -np.inf)
        want[[3, 13, 76]] = penalized(logits, repetition=1.5, frequency=0.5)[[3, 13, 76]]
        want[3] += 4.0
        got = processed(request, logits, OUTPUT, history=history)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_contradictory_parameters_fall_back_to_the_allowed_tokens(logits):
    request = make_request(stop_token_ids=(3, 4), allowed_token_ids=[3, 4], min_tokens=2, temperature=0.0)
    got = processed(request, logits)
    assert set(np.flatnonzero(np.isfinite(got))) == {3, 4}
    np.testing.assert_array_equal(got[[3, 4]], logits[[3, 4]])
    nothing_exists = make_request(allowed_token_ids=[VOCAB])
    np.testing.assert_array_equal(processed(nothing_exists, logits), logits)
    logits[[3, 4]] = -np.inf
    assert set(np.flatnonzero(np.isfinite(processed(request, logits)))) == {3, 4}


def test_extreme_penalties_stay_finite(logits):
    got = processed(make_request((5, 6), repetition_penalty=1e-45), logits)
    assert not np.isnan(got).any()
    assert np.isfinite(got.max())


def test_record_continues_what_extras_began(logits):
    """Counting token by token gives the same as packing the whole history again after a preemption."""
    request = make_request((5, 6, 5), frequency_penalty=0.5, repetition_penalty=1.2, bad_word_ids=((3, 76, 8), (3,)))
    other = make_request((1,))
    state = put(put(init_state(NUM_SLOTS, VOCAB), 2, request), 4, other)
    for token in OUTPUT:
        slots = ints(2, 4, NUM_SLOTS, 1)
        active = jnp.array([True, True, False, False])
        state = jit_record(state, slots, ints(token, token, 0, 7), active, union(request, other))
    step = (ints(2), ints(len(OUTPUT)), union(request))
    got = jit_process(jnp.asarray(logits)[None], state, *step)[0]
    np.testing.assert_allclose(np.asarray(got), processed(request, logits, OUTPUT), rtol=1e-6)
    assert not np.asarray(state.extras.output_counts)[[0, 1, 3, 5]].any()


def test_record_keeps_nothing_that_nobody_needs():
    state = init_state(NUM_SLOTS, VOCAB)
    after = jit_record(state, ints(1, 2), ints(3, 4), jnp.array([True, True]), ints(int(Feature.RANDOM))[0])
    jax.tree.map(np.testing.assert_array_equal, state, after)
