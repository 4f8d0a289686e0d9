"""The sampler against plain NumPy: the distributions by chi-square, and the independence of rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first
from sampling_harness import EVERYTHING, NUM_SLOTS, VOCAB, ints, jit_record, jit_sample, make_request, put, union
from scipy import stats

from jaxserve.sampling import NUM_SCALARS, init_state, record, sample
from pallas_kernels.deviceless import compile_for_h200


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_host_has_no_part_in_it_on_a_gpu():
    """What is needed is decided on the device: branches are in the step's command buffer, and a plain step has none."""

    def step(logits, state, slot_ids, num_output_tokens, features, *, plain):
        sampled = sample(logits, state, slot_ids, num_output_tokens, features, plain=plain, implementation="sm90")
        return sampled, record(state, slot_ids, sampled.token_ids, ~sampled.is_corrupted, features)

    rows = jax.ShapeDtypeStruct((4,), jnp.int32)
    args = (
        jax.ShapeDtypeStruct((4, 1000), jnp.float32),
        jax.eval_shape(lambda: init_state(NUM_SLOTS, 1000)),
        rows,
        rows,
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    full, plain = (
        compile_for_h200(functools.partial(step, plain=plain), *args, donate_argnums=(1,)) for plain in (False, True)
    )
    assert full.thunks == {"kCommandBuffer": 1}
    assert " conditional(" in full.compiled.as_text()
    assert plain.thunks == {"kCommandBuffer": 1}
    assert " conditional(" not in plain.compiled.as_text()
    assert " sort(" not in plain.compiled.as_text()


def numpy_distribution(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, top_n_sigma=0.0):
    """Compute the definition, by sorting, in float64."""
    x = logits.astype(np.float64)
    if top_n_sigma:
        x = np.where(x >= x.max() - top_n_sigma * x[np.isfinite(x)].std(), x, -np.inf)
    x = x / temperature
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
    {"top_n_sigma": 1.0},
    {"temperature": 3.0, "top_n_sigma": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.2},
    {"temperature": 0.0},
]


@pytest.mark.slow
def test_distributions_in_one_mixed_batch():
    """All parameter sets together, 20,000 draws each, with fixed seeds."""
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
    """A seed and a counter determine the token in any row and slot, whatever the other rows are."""
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


@pytest.mark.slow
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


@pytest.mark.parametrize("plain", quick_first([False, True]))
def test_greedy_takes_the_lowest_of_equals(plain):
    logits = np.zeros((3, VOCAB), np.float32)
    logits[0, [9, 40]] = 5
    logits[2, [VOCAB - 1]] = 1e-6
    state = init_state(NUM_SLOTS, VOCAB)
    for slot in range(3):
        state = put(state, slot, make_request(temperature=0.0))
    got = jit_sample(jnp.asarray(logits), state, ints(0, 1, 2), ints(0, 0, 0), ints(0)[0], plain=plain)
    assert list(got.token_ids) == [9, 0, VOCAB - 1]
    assert got.token_ids.dtype == jnp.int32
    assert not got.is_corrupted.any()


@pytest.mark.parametrize("plain", quick_first([False, True]))
def test_corrupted_rows_are_reported_and_harm_nobody(plain):
    logits = np.random.default_rng(3).standard_normal((6, VOCAB)).astype(np.float32)
    healthy = logits.copy()
    logits[1, 5] = np.nan
    logits[2] = -np.inf
    logits[3, 7] = np.inf
    logits[4, :-1] = -np.inf  # unusual, but one token is possible
    temperature = 0.0 if plain else 0.8
    requests = [make_request(temperature=temperature, top_p=0.9, seed=i) for i in range(6)]
    state = init_state(NUM_SLOTS, VOCAB)
    for slot, request in enumerate(requests):
        state = put(state, slot, request)
    run = functools.partial(jit_sample, plain=plain)
    step = (state, jnp.arange(6), jnp.zeros(6, jnp.int32), union(*requests))
    got, want = run(jnp.asarray(logits), *step), run(jnp.asarray(healthy), *step)
    assert list(got.is_corrupted) == [False, True, True, True, False, False]
    assert not np.asarray(got.token_ids)[1:4].any()
    assert list(got.token_ids[jnp.array([0, 5])]) == list(want.token_ids[jnp.array([0, 5])])
    assert got.token_ids[4] == VOCAB - 1


@pytest.mark.parametrize("temperature", quick_first([1e-45, 1e-9, 1e-6]))
def test_tiny_temperatures_are_greedy(temperature):
    logits = np.random.default_rng(4).standard_normal((1, VOCAB)).astype(np.float32) * 1e4
    state = put(init_state(1, VOCAB), 0, make_request(temperature=temperature))
    got = jit_sample(jnp.asarray(logits), state, ints(0), ints(0), union(make_request()))
    assert int(got.token_ids[0]) == logits.argmax()


def test_rows_of_padding_may_point_anywhere():
    state = put(init_state(NUM_SLOTS, VOCAB), 0, EVERYTHING)
    got = jit_sample(jnp.zeros((2, VOCAB)), state, ints(0, NUM_SLOTS), ints(0, 0), union(EVERYTHING))
    assert int(got.token_ids[0]) in {8, 11}


@pytest.mark.slow
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


def test_scalars_are_few_words():
    assert NUM_SCALARS <= 16  # they are uploaded for every admission, extras only for the few that need them
