"""The sampler against plain NumPy: each processor, the distributions by chi-square, and what rows must not do to
each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxserve.request import EngineRequest, SamplingParams
from jaxserve.sampling import (
    Feature,
    admit,
    admit_extras,
    features,
    has_extras,
    init_state,
    pack_extras,
    pack_scalars,
    record,
    sample,
)
from jaxserve.sampling.processors import process
from jaxserve.sampling.state import unpack_rows

VOCAB = 77
NUM_SLOTS = 6

jit_sample = jax.jit(sample, static_argnames="greedy_only")
jit_record = jax.jit(record)
jit_admit = jax.jit(admit)
jit_admit_extras = jax.jit(admit_extras)


@jax.jit
def jit_process(logits, state, slot_ids, num_output_tokens, features):
    return process(
        logits,
        unpack_rows(state, slot_ids),
        state.extras,
        slot_ids=slot_ids,
        num_output_tokens=num_output_tokens,
        features=features,
    )


def make_request(prompt=(1,), *, seed=0, stop_token_ids=(), bad_word_ids=(), **params):
    return EngineRequest(
        request_id="r",
        group_id="r",
        prompt_token_ids=list(prompt),
        params=SamplingParams(**{"max_tokens": 100} | params),
        max_tokens=100,
        stop_token_ids=frozenset(stop_token_ids),
        bad_word_ids=tuple(tuple(word) for word in bad_word_ids),
        seed=seed,
    )


def put(state, slot, request, output=()):
    """Admit one request, which may have generated some tokens already, as the runner does."""
    slots = jnp.array([slot, len(state.scalars)], jnp.int32)  # and a row of padding
    rows = np.stack([pack_scalars(request), np.full_like(pack_scalars(request), 9)])
    state = jit_admit(state, slots, jnp.asarray(rows))
    if has_extras(request):
        vocab_size = state.extras.output_counts.shape[1]
        tokens = [*request.prompt_token_ids, *output]
        extras = pack_extras(request, tokens, len(request.prompt_token_ids), vocab_size=vocab_size)
        state = jit_admit_extras(state, jnp.int32(slot), extras)
    return state


def ints(*values):
    return jnp.array(values, jnp.int32)


def union(*requests):
    return jnp.int32(functools.reduce(lambda a, b: a | b, (features(r) for r in requests), 0))


def processed(request, logits, output=(), *, history=()):
    """The logits that a request in slot 2 of a used state would be sampled from."""
    state = init_state(NUM_SLOTS, VOCAB)
    for earlier in history:
        state = put(state, 2, earlier, output=range(30))
    state = put(state, 2, request, output)
    got = jit_process(jnp.asarray(logits)[None], state, ints(2), ints(len(output)), union(request, *history))
    return np.asarray(got[0])


@pytest.fixture
def logits():
    return np.random.default_rng(0).standard_normal(VOCAB).astype(np.float32) * 3


EVERYTHING = make_request(
    (5, 6, 7),
    stop_token_ids=(1, 2, 3),
    bad_word_ids=((4,), (9, 10)),
    repetition_penalty=3.0,
    frequency_penalty=1.0,
    presence_penalty=1.0,
    logit_bias={8: 50.0},
    allowed_token_ids=[1, 2, 8, 11],
    min_tokens=90,
)
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
        bias = {0: 1.5, 31: -100.0, VOCAB - 1: 100.0, VOCAB: 7.0, -1: 7.0, 10**6: 7.0}
        want = logits.copy()
        want[[0, 31, VOCAB - 1]] += [1.5, -100.0, 100.0]
        got = processed(make_request(logit_bias=bias), logits, history=history)
        np.testing.assert_allclose(got, want, rtol=1e-6)

    def test_allowed_tokens(self, logits, history):
        allowed = [0, 31, 32, VOCAB - 1, VOCAB, -1, VOCAB + 32]
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


def test_contradictory_wishes_fall_back_to_the_allowed_tokens(logits):
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


def test_the_state_is_never_copied():
    """A donated step that reads and records needs scratch memory for its rows, not for the slots."""

    def step(logits, state, slot_ids, num_output_tokens, features):
        sampled = sample(logits, state, slot_ids, num_output_tokens, features)
        return sampled, record(state, slot_ids, sampled.token_ids, ~sampled.is_corrupted, features)

    state = jax.eval_shape(lambda: init_state(10_000, VOCAB))
    rows = jax.ShapeDtypeStruct((2,), jnp.int32)
    bits = jax.ShapeDtypeStruct((), jnp.int32)
    lowered = jax.jit(step, donate_argnums=1).lower(jnp.zeros((2, VOCAB)), state, rows, rows, bits)
    memory = lowered.compile().memory_analysis()
    smallest_leaf = min(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert memory.temp_size_in_bytes < smallest_leaf


def test_record_keeps_nothing_that_nobody_needs():
    state = init_state(NUM_SLOTS, VOCAB)
    after = jit_record(state, ints(1, 2), ints(3, 4), jnp.array([True, True]), ints(int(Feature.RANDOM))[0])
    jax.tree.map(np.testing.assert_array_equal, state, after)


def numpy_distribution(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The definition, by sorting, in float64."""
    x = logits.astype(np.float64) / temperature
    keep = np.ones(len(x), bool)
    if top_k > 0:
        keep &= x >= np.sort(x)[::-1][min(top_k, len(x)) - 1]
    p = np.where(keep, np.exp(x - x.max()), 0)
    p /= p.sum()
    mass_before = np.array([p[p > p[i]].sum() for i in range(len(p))])
    keep &= mass_before < top_p
    p = np.where(keep, p, 0)
    p = np.where(p >= min_p * p.max(), p, 0)
    return p / p.sum()


DISTRIBUTIONS = [
    {},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10**9},
    {"top_p": 0.05},
    {"top_p": 0.6},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.7},
    {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 0.0},
]


def test_distributions_in_one_mixed_batch():
    """Every parameter set beside every other, 20,000 draws each, with fixed seeds."""
    num_draws, batch = 20_000, 4_000
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal(VOCAB) * 2).astype(np.float32)
    logits[10:13] = logits[20]  # ties
    logits[30] = -np.inf
    requests = [make_request(seed=17 * i - 40, **params) for i, params in enumerate(DISTRIBUTIONS)]
    state = init_state(len(requests), VOCAB)
    for slot, request in enumerate(requests):
        state = put(state, slot, request)
    slots = np.arange(num_draws * len(requests), dtype=np.int32) % len(requests)
    counters = np.arange(num_draws * len(requests), dtype=np.int32) // len(requests)
    tiled = jnp.broadcast_to(jnp.asarray(logits)[None], (batch, VOCAB))
    drawn = [
        jit_sample(tiled, state, slots[i : i + batch], counters[i : i + batch], union(*requests)).token_ids
        for i in range(0, len(slots), batch)
    ]
    drawn = np.concatenate([np.asarray(x) for x in drawn])
    for slot, params in enumerate(DISTRIBUTIONS):
        observed = np.bincount(drawn[slots == slot], minlength=VOCAB)
        if params.get("temperature") == 0.0:
            assert observed[logits.argmax()] == num_draws
            continue
        p = numpy_distribution(logits, **params)
        assert not observed[p == 0].any(), params
        common = p * num_draws >= 5
        observed = np.append(observed[common], observed[~common].sum())
        wanted = np.append(p[common], p[~common].sum()) * num_draws
        if wanted[-1] == 0:
            observed, wanted = observed[:-1], wanted[:-1]
        if len(wanted) > 1:
            assert stats.chisquare(observed, wanted).pvalue > 1e-4, params


def test_a_row_does_not_depend_on_its_neighbours():
    """The same seed and counter give the same token, in any row, slot and company."""
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((4, VOCAB)).astype(np.float32)
    mine = make_request(seed=-(2**63), temperature=0.9, top_p=0.95)
    others = [make_request(seed=i, top_k=5, presence_penalty=1.0, min_p=0.1) for i in range(3)]

    def tokens(row, slot):
        state = put(init_state(NUM_SLOTS, VOCAB), slot, mine)
        slots = [slot] * 4
        for i, request in enumerate(others):
            slots[(row + i + 1) % 4] = (slot + i + 1) % NUM_SLOTS
            state = put(state, (slot + i + 1) % NUM_SLOTS, request)
        drawn = []
        for counter in range(30):
            batch = rng.standard_normal((4, VOCAB)).astype(np.float32)
            batch[row] = logits[counter % 4]
            got = jit_sample(jnp.asarray(batch), state, ints(*slots), ints(*[counter] * 4), union(mine, *others))
            drawn.append(int(got.token_ids[row]))
        return drawn

    first = tokens(0, 0)
    assert len(set(first)) > 5
    assert tokens(2, 3) == first


def test_seeds_differ_in_every_bit():
    seeds = [0, 1, -1, 2**31, 2**32, 2**63 - 1, -(2**63), 5 << 32, 5]
    state = init_state(len(seeds), VOCAB)
    for slot, seed in enumerate(seeds):
        state = put(state, slot, make_request(seed=seed))
    flat = jnp.zeros((len(seeds), VOCAB))
    texts = [
        np.asarray(jit_sample(flat, state, jnp.arange(len(seeds)), jnp.full(len(seeds), i), union(make_request()))[0])
        for i in range(12)
    ]
    assert len({tuple(text) for text in np.stack(texts, axis=1)}) == len(seeds)


@pytest.mark.parametrize("greedy_only", [True, False])
def test_greedy_takes_the_lowest_of_equals(greedy_only):
    logits = np.zeros((3, VOCAB), np.float32)
    logits[0, [9, 40]] = 5
    logits[2, [VOCAB - 1]] = 1e-6
    state = init_state(NUM_SLOTS, VOCAB)
    for slot in range(3):
        state = put(state, slot, make_request(temperature=0.0))
    got = jit_sample(jnp.asarray(logits), state, ints(0, 1, 2), ints(0, 0, 0), ints(0)[0], greedy_only=greedy_only)
    assert list(got.token_ids) == [9, 0, VOCAB - 1]
    assert got.token_ids.dtype == jnp.int32
    assert not got.is_corrupted.any()


@pytest.mark.parametrize("greedy_only", [True, False])
def test_corrupted_rows_are_told_and_harm_nobody(greedy_only):
    logits = np.random.default_rng(3).standard_normal((6, VOCAB)).astype(np.float32)
    healthy = logits.copy()
    logits[1, 5] = np.nan
    logits[2] = -np.inf
    logits[3, 7] = np.inf
    logits[4, :-1] = -np.inf  # unusual, but one token is possible
    temperature = 0.0 if greedy_only else 0.8
    requests = [make_request(temperature=temperature, top_p=0.9, seed=i) for i in range(6)]
    state = init_state(NUM_SLOTS, VOCAB)
    for slot, request in enumerate(requests):
        state = put(state, slot, request)
    run = functools.partial(jit_sample, greedy_only=greedy_only)
    step = (state, jnp.arange(6), jnp.zeros(6, jnp.int32), union(*requests))
    got, want = run(jnp.asarray(logits), *step), run(jnp.asarray(healthy), *step)
    assert list(got.is_corrupted) == [False, True, True, True, False, False]
    assert not np.asarray(got.token_ids)[1:4].any()
    assert list(got.token_ids[jnp.array([0, 5])]) == list(want.token_ids[jnp.array([0, 5])])
    assert got.token_ids[4] == VOCAB - 1


@pytest.mark.parametrize("temperature", [1e-45, 1e-9, 1e-6])
def test_tiny_temperatures_are_greedy(temperature):
    logits = np.random.default_rng(4).standard_normal((1, VOCAB)).astype(np.float32) * 1e4
    state = put(init_state(1, VOCAB), 0, make_request(temperature=temperature))
    got = jit_sample(jnp.asarray(logits), state, ints(0), ints(0), union(make_request()))
    assert int(got.token_ids[0]) == logits.argmax()


def test_rows_of_padding_may_point_anywhere():
    state = put(init_state(NUM_SLOTS, VOCAB), 0, EVERYTHING)
    got = jit_sample(jnp.zeros((2, VOCAB)), state, ints(0, NUM_SLOTS), ints(0, 0), union(EVERYTHING))
    assert int(got.token_ids[0]) in {8, 11}


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto], ids=str)
def test_runs_on_a_mesh(axis_type):
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(axis_type,), devices=jax.devices()[:2])
    logits = jnp.asarray(np.random.default_rng(5).standard_normal((2, VOCAB)), jnp.float32)
    plain = make_request(seed=3, top_k=9, top_p=0.8)

    def tokens(sharding):
        state = put(put(init_state(NUM_SLOTS, VOCAB), 0, plain), 1, EVERYTHING)
        args = (logits, state, ints(0, 1), ints(4, 4), union(plain, EVERYTHING))
        args = args if sharding is None else jax.device_put(args, sharding)
        sampled = jit_sample(*args)
        state = jit_record(args[1], args[2], sampled.token_ids, ~sampled.is_corrupted, args[4])
        return np.asarray(sampled.token_ids), np.asarray(state.extras.output_counts)

    alone = tokens(None)
    with jax.set_mesh(mesh):
        on_mesh = tokens(jax.NamedSharding(mesh, jax.P()))
    jax.tree.map(np.testing.assert_array_equal, alone, on_mesh)
