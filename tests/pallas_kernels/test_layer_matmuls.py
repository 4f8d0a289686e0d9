"""The matmuls between two attentions: XLA's against the float64 definition; the Hopper kernel interpreted with race
detection, one matmul at a time without shared tiles, compiled for an H200 without one, and run on one if there is one.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first
from interpreting import interpret
from kernel_results import in_float, relative_error, silu

from pallas_kernels.deviceless import compile_for_h200
from pallas_kernels.layer_matmuls import Weights, attention, kernel, layer_matmuls, sm90, why_not
from pallas_kernels.layer_matmuls.reference import layer_matmuls_reference
from pallas_kernels.layer_matmuls.sm90 import Config, Product, cut, cut_all, heuristic, layer_matmuls_sm90

EPS = 1e-5
# Relative to the norm of the result: values between two matmuls are rounded to 8 bits too.
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 6e-3}
ACTIVATIONS = {"silu": jax.nn.silu, "gelu": functools.partial(jax.nn.gelu, approximate=True)}


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def make_case(num_rows, depth=64, hidden=64, inner=64, outputs: int | None = 64, *, dtype=jnp.bfloat16, seed=0):
    """Heads, residual, weights and gains."""
    rng = np.random.default_rng(seed)

    def array(*shape, size=1.0):
        return jnp.asarray(size * rng.standard_normal(shape), dtype)

    weights = Weights(
        o=array(hidden, depth, size=depth**-0.5),
        gate_up=array(2, inner, hidden, size=hidden**-0.5),
        down=array(hidden, inner, size=2 * inner**-0.5),
        qkv=None if outputs is None else array(outputs, hidden, size=hidden**-0.5),
    )
    gains = tuple(1 + 0.2 * array(hidden) for _ in range(2))
    return array(num_rows, depth), array(num_rows, hidden), weights, gains


def check(got, case, activation=silu):
    """Check the residual stream, then the next matmul's results against the reference's of that very stream."""
    heads, residual, weights, gains = in_float(case)
    x, y = layer_matmuls_reference(heads, residual, **weights._asdict(), gains=gains, activation=activation, eps=EPS)
    for result, want in zip(got, (x, y), strict=True):
        assert relative_error(result, want) <= TOLERANCE[result.dtype.type]


def run(case, activation=jax.nn.silu, implementation="sm90"):
    return layer_matmuls(*case, activation=activation, eps=EPS, implementation=implementation)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("outputs", [24, None])
def test_xla_matches_the_definition(outputs, dtype):
    case = make_case(5, 16, 32, 40, outputs, dtype=dtype)
    check(run(case, implementation="xla"), case)


def test_the_gate_has_the_activation_that_is_asked_for():
    case = make_case(2, dtype=jnp.float32)
    check(run(case, ACTIVATIONS["gelu"], "xla"), case, gelu)


@pytest.mark.parametrize(
    ("name", "shape", "error"),
    [
        ("residual", (3, 64), r"residual must have shape \(2, 64\), got \(3, 64\)"),
        ("o", (64, 32), r"o must have shape \(64, 64\)"),
        ("gate_up", (64, 64), r"gate_up must have shape \(2, 64, 64\)"),
        ("down", (32, 64), r"down must have shape \(64, 64\)"),
        ("qkv", (64, 32), r"qkv must have shape \(64, 64\)"),
        ("gain", (32,), r"gains\[1\] must have shape \(64,\)"),
    ],
)
def test_bad_shapes_are_refused(name, shape, error):
    heads, residual, weights, gains = make_case(2)
    wrong = jnp.zeros(shape, jnp.bfloat16)
    if name == "residual":
        residual = wrong
    elif name == "gain":
        gains = gains[0], wrong
    else:
        weights = weights._replace(**{name: wrong})
    with pytest.raises(ValueError, match=error):
        run((heads, residual, weights, gains))


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"num_rows": 65}, "at most 64 rows, got 65"),
        ({"num_rows": 0}, "at least one row"),
        ({"num_rows": 2, "dtype": jnp.float32}, "bfloat16, got heads of float32"),
        ({"num_rows": 2, "depth": 96}, "multiples of 64"),
        ({"num_rows": 2, "outputs": 68}, "multiples of 8"),
        ({"num_rows": 2, "outputs": 56}, "at least 64"),
        ({"num_rows": 2, "outputs": 132 * 128 * 16 + 8}, "at most 16 rounds"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(sizes, reason):
    heads, residual, weights, gains = jax.eval_shape(functools.partial(make_case_of_zeros, **sizes))
    assert why_not(heads, weights) is not None
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(lambda *case: run(case), heads, residual, weights, gains)


def make_case_of_zeros(num_rows, depth=64, outputs=64, dtype=jnp.bfloat16):
    def zeros(*shape):
        return jnp.zeros(shape, dtype)

    weights = Weights(zeros(64, depth), zeros(2, 64, 64), zeros(64, 64), zeros(outputs, 64))
    return zeros(num_rows, depth), zeros(num_rows, 64), weights, (zeros(64), zeros(64))


def cut_for(monkeypatch, num_sms):
    """Pretend that the GPU has `num_sms` multiprocessors, each with one CTA."""
    for module in (sm90, kernel, attention):
        monkeypatch.setattr(module, "NUM_SMS", num_sms)
    of_attention = sm90.AttentionConfig
    monkeypatch.setattr(sm90, "AttentionConfig", lambda **sizes: of_attention(**sizes, num_ctas=num_sms))


FEW_SMS = 26
"""Number of multiprocessors: two more than any interpreted case has tiles for; further ones would idle as these two."""
# A CTA's rings are so small that each slot is reused; tiles extend beyond the last output.
INTERPRETED = {
    "8 rows": (
        {"num_rows": 8, "depth": 128, "hidden": 192, "inner": 64, "outputs": 72},
        Config(slot_bytes=4096, w_slots=2, x_bytes=8192),
    ),
    "16 rows, no qkv": (
        {"num_rows": 16, "depth": 192, "hidden": 64, "inner": 128, "outputs": None},
        Config(slot_bytes=4096, w_slots=3, x_bytes=16384),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted_without_races(capsys, monkeypatch, name):
    cut_for(monkeypatch, FEW_SMS)
    sizes, config = INTERPRETED[name]
    case = make_case(**sizes)
    options = {"activation": jax.nn.silu, "eps": EPS, "config": config, "interpret": True}
    check(interpret(capsys, layer_matmuls_sm90, *case, **options), case)


@pytest.mark.parametrize("num_rows", [8, 16, 24, 40, 64])
@pytest.mark.parametrize("depth", [64, 128, 896, 14_336])
@pytest.mark.parametrize("outputs", [64, 72, 1152, 4096, 6144, 70_000])
@pytest.mark.parametrize("halves", [(), (2,)])
def test_steps_have_room_to_follow_each_other(num_rows, depth, outputs, halves):
    """Otherwise a GPU would wait for ever: a step's slots are given back when the next one has begun."""
    weight = jax.ShapeDtypeStruct((*halves, outputs, depth), jnp.bfloat16)
    product = Product("o", "heads", "y", weight)
    config = heuristic(num_rows, [product])
    matmul = cut(product, num_rows, config)
    assert config.w_slots >= 2
    assert matmul.x_slots >= 2
    assert matmul.x_slots * num_rows * matmul.block_k * 2 <= config.x_bytes
    assert matmul.halves * matmul.tile * matmul.block_k * 2 <= config.slot_bytes
    if matmul.split > 1:  # the part that a cluster finishes is within the outputs: the kernel does not check that
        assert (matmul.num_tiles * matmul.split - 1) * matmul.width < outputs
        assert matmul.rounds == matmul.halves == 1


@pytest.mark.parametrize("lacking", [{"w_slots": 1}, {"x_bytes": 255 * 64}])
def test_a_config_without_room_for_two_steps_is_refused(lacking):
    product = Product("o", "heads", "y", jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16))
    with pytest.raises(ValueError, match="no room for two steps of 64 rows and 64 outputs"):
        cut(product, 64, dataclasses.replace(heuristic(64, [product]), **lacking))


def test_two_thread_blocks_share_a_tile_where_rows_are_more_than_weights():
    def split(num_rows, outputs):
        product = Product("o", "heads", "y", jax.ShapeDtypeStruct((outputs, 4096), jnp.bfloat16))
        return cut(product, num_rows, heuristic(num_rows, [product])).split

    assert [split(num_rows, 4096) for num_rows in (16, 32, 40, 64)] == [1, 1, 2, 2]
    assert [split(64, outputs) for outputs in (6144, 14_336)] == [2, 1]


def test_blocks_begin_with_other_parts_of_rows_that_come_at_once_and_are_not_shared():
    def begin_apart(num_rows):
        shapes = {"o": (4096, 4096), "gate_up": (2, 14_336, 4096), "down": (4096, 14_336), "qkv": (6144, 4096)}
        products = [
            Product(name, "x", "y", jax.ShapeDtypeStruct(shape, jnp.bfloat16)) for name, shape in shapes.items()
        ]
        matmuls = cut_all(products, num_rows, heuristic(num_rows, products))
        return {matmul.name for matmul in matmuls if matmul.begins_apart}

    assert begin_apart(1) == begin_apart(16) == {"o", "gate_up", "qkv"}  # down's come in two rounds
    assert begin_apart(64) == {"gate_up"}


LLAMA_3_8B = {"depth": 4096, "hidden": 4096, "inner": 14336, "outputs": 6144}


@functools.cache
def compiled(num_rows, *, num_layers=1, depth, hidden, inner, outputs):
    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    weights = Weights(
        of(hidden, depth), of(2, inner, hidden), of(hidden, inner), None if outputs is None else of(outputs, hidden)
    )

    def layers(heads, x, weights, gains):
        results = []
        for index, own in enumerate(weights):
            x, y = run((heads + index, x, own, gains))
            results.append(y)
        return x, results

    return compile_for_h200(
        layers, of(num_rows, depth), of(num_rows, hidden), [weights] * num_layers, (of(hidden),) * 2
    )


TILES_OF_8 = {"depth": 2048, "hidden": 1024, "inner": 3072, "outputs": 4096}
TILES_BEYOND_THE_LAST_OUTPUT = {"depth": 2048, "hidden": 2560, "inner": 9728, "outputs": 4856}


# Each of these sizes with the number of rows that takes most registers, and with fewer rows.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "sizes"),
    quick_first(
        [
            (1, LLAMA_3_8B),
            (16, LLAMA_3_8B),
            (64, LLAMA_3_8B),
            (1, LLAMA_3_8B | {"outputs": None}),
            (64, LLAMA_3_8B | {"outputs": None}),
            (1, TILES_OF_8),
            (64, TILES_OF_8),
            (16, {"depth": 896, "hidden": 896, "inner": 4864, "outputs": 1152}),
            (64, {"depth": 896, "hidden": 896, "inner": 4864, "outputs": 1152}),
            (16, TILES_BEYOND_THE_LAST_OUTPUT),
            (64, TILES_BEYOND_THE_LAST_OUTPUT),
            (64, {"depth": 8192, "hidden": 8192, "inner": 28672, "outputs": 10240}),
        ]
    ),
    ids=str,
)
def test_compiles_without_spilling(num_rows, sizes):
    [kernel] = compiled(num_rows, **sizes).kernels
    assert kernel.spill_bytes == 0


@pytest.mark.slow
def test_layers_share_a_kernel_and_its_counters():
    one, four = compiled(16, **LLAMA_3_8B), compiled(16, **LLAMA_3_8B, num_layers=4)
    assert len(four.kernels) <= 2  # jax takes a residual stream that another kernel wrote for another type
    assert one.num_launches == 2  # its counters are zeros
    assert four.num_launches == 1 + 4 + 1  # one adds to all layers' heads


ON_A_GPU = {
    "Llama-3-8B": LLAMA_3_8B,
    "its last layer": LLAMA_3_8B | {"outputs": None},
    "small": {"depth": 896, "hidden": 896, "inner": 4864, "outputs": 1152},
    "tiles of 8": {"depth": 2048, "hidden": 1024, "inner": 3072, "outputs": 4096},
    "odd": {"depth": 192, "hidden": 4864, "inner": 832, "outputs": 72},
    "wide": {"depth": 64, "hidden": 64, "inner": 40_000, "outputs": 70_000},
    "tiny": {"depth": 64, "hidden": 64, "inner": 64, "outputs": 64},
}


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("num_rows", [1, 3, 8, 13, 16, 17, 33, 64])
@pytest.mark.parametrize("name", ON_A_GPU)
def test_on_a_gpu(name, num_rows):
    sizes = ON_A_GPU[name]
    case = make_case(num_rows, **sizes)
    got = run(case)
    check(got, case)
    for _ in range(20):
        for a, b in zip(run(case), got, strict=True):
            np.testing.assert_array_equal(in_float(a), in_float(b))


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("num_rows", [1, 16, 64])
def test_layers_one_after_the_other_on_a_gpu(num_rows):
    """In one program, in which they use the same counters, and with rows of other layers in their outputs."""
    sizes = {"depth": 512, "hidden": 1024, "inner": 2816, "outputs": 512}
    cases = [make_case(num_rows, **sizes, seed=seed) for seed in range(8)] * 4

    @jax.jit
    def layers(cases):
        heads, x = cases[0][:2]
        results = []
        for _, _, weights, gains in cases:
            results.append((heads, x))
            x, heads = run((heads, x, weights, gains))
            results.append((x, heads))
            x /= 4
        return results

    got, again = layers(cases), layers(cases)
    for index, (_, _, *own) in enumerate(cases):
        check(got[2 * index + 1], (*got[2 * index], *own))
    jax.tree.map(np.testing.assert_array_equal, *in_float((got, again)))
