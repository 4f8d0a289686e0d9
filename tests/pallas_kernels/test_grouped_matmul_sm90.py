"""The Hopper kernel of the grouped matmul: interpreted on a CPU with race detection, compiled for an H200 that is not
there, and run where there is one; always with NaN in the rows past all groups.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codes_cases import ON_A_GPU, make_case
from depths import quick_first
from interpreting import interpret
from kernel_results import check_rows

from pallas_kernels.deviceless import compile_for_h200
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.sm90 import Config, grouped_matmul_sm90, heuristic
from pallas_kernels.grouped_matmul.tiles import max_tiles, plan, tile_rows
from pallas_kernels.hopper import SHARED_MEMORY
from pallas_kernels.inputs import swiglu

# Relative to the norm of the result, which is rounded to 8 or 11 bits.
TOLERANCE = {jnp.bfloat16: 2.5e-3, jnp.float16: 4e-4}


def check(got, want):
    check_rows(got[: len(want)], want, TOLERANCE[got.dtype.type])


@pytest.mark.parametrize("sizes", [[0] * 5, [200, 0, 0, 0, 0], [1, 63, 64, 0, 65], [0, 0, 0, 0, 1], [128] * 5], ids=str)
def test_plan_covers_each_group(sizes):
    num_rows = sum(sizes) + 3
    tiles = plan(jnp.array(sizes, jnp.int32), num_rows=num_rows, tile_rows=64)
    ends = np.cumsum(sizes)
    rows = []
    num_tiles = int(tiles.first[1, -1])
    assert num_tiles <= max_tiles(len(sizes), num_rows=num_rows, tile_rows=64) == len(tiles.row)
    for index in range(num_tiles):
        group, row, count = (int(values[index]) for values in (tiles.group, tiles.row, tiles.num_rows))
        assert 0 < count <= 64
        assert ends[group] - sizes[group] <= row < row + count <= ends[group]
        rows += range(row, row + count)
    assert rows == list(range(sum(sizes)))


INTERPRETED = {
    # Empty groups, rows before a group's own in a box of 8, padding; outputs and K that are not multiples of the tile.
    "few rows": (
        {"sizes": [3, 0, 20], "num_rows": 27, "outputs": 72, "depth": 192, "is_gated": True, "has_bias": True},
        Config(rows=64, outputs=64, block_k=128, stages=2, num_blocks=2),
    ),
    # Two computing warpgroups of which one has nothing to do, full boxes, several tiles of a group, two items per CTA.
    "many rows": (
        {"sizes": [65, 0, 135], "num_rows": 216, "outputs": 64, "depth": 128, "dtype": jnp.float16},
        Config(rows=128, outputs=64, block_k=64, stages=2, num_blocks=2),
    ),
}


@pytest.mark.parametrize(("case", "is_planned"), quick_first([("few rows", True), ("many rows", False)]))
def test_interpreted_without_races(capsys, case, is_planned):
    problem, config = INTERPRETED[case]
    arguments, options, want = make_case(**problem)
    tiles = plan(arguments[2], num_rows=problem["num_rows"], tile_rows=config.rows) if is_planned else None
    run = functools.partial(grouped_matmul_sm90, tiles=tiles, config=config, interpret=True, **options)
    check(interpret(capsys, run, *arguments), want)


def test_no_rows():
    got = grouped_matmul(
        jnp.zeros((0, 64), jnp.bfloat16),
        jnp.zeros((2, 64, 64), jnp.bfloat16),
        jnp.zeros(2, jnp.int32),
        implementation="sm90",
    )
    assert got.shape == (0, 64)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("num_rows", [1, 8, 512, 4097, 65_536])
@pytest.mark.parametrize(
    "weight", [(128, 768, 2048), (128, 2048, 768), (8, 14_336, 4096), (32, 2880, 2880), (2, 72, 64)]
)
def test_every_config_fits(weight, num_rows, is_gated):
    config = heuristic(num_rows, weight, is_gated=is_gated)
    assert config.shared_memory(is_gated=is_gated) <= SHARED_MEMORY
    assert config.stages >= 3
    assert config.outputs <= weight[1]
    assert config.rows == (128 if num_rows > 32 * weight[0] else 64)


def test_few_experts_keep_most_multiprocessors_reading():
    # One token of Qwen3-30B-A3B: 8 experts.
    assert 8 * 768 // heuristic(8, (128, 2, 768, 2048), is_gated=True).outputs == 96
    assert 8 * 2048 // heuristic(8, (128, 2048, 768), is_gated=False).outputs == 128


@pytest.mark.parametrize(
    ("x", "weight", "dtype", "reason"),
    [
        ((8, 64), (2, 64, 64), jnp.float32, "bfloat16 or float16"),
        ((8, 96), (2, 64, 96), jnp.bfloat16, "multiples of 64"),
        ((8, 64), (2, 68, 64), jnp.bfloat16, "multiples of 8"),
        ((8, 64), (2, 56, 64), jnp.bfloat16, "at least 64"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(x, weight, dtype, reason):
    sizes = jnp.zeros(weight[0], jnp.int32)
    with pytest.raises(NotImplementedError, match=reason):
        grouped_matmul(jnp.zeros(x, dtype), jnp.zeros(weight, dtype), sizes, implementation="sm90")


@pytest.mark.slow
def test_compiles_without_spilling():
    """Many rows: the step that tests/execution compiles has few."""
    num_rows, outputs, depth = 65_536, 768, 2048
    shapes = [(num_rows, depth), (128, 2, outputs, depth), (128, 2, outputs)]

    def layer(x, weight, bias, sizes, tiles):
        options = {"bias": bias, "activation": swiglu, "tiles": tiles}
        return grouped_matmul(x, weight, sizes, **options, implementation="sm90")

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    sizes = jax.ShapeDtypeStruct((128,), jnp.int32)
    program = compile_for_h200(layer, *shapes, sizes, None)
    [kernel] = program.kernels
    assert kernel.spill_bytes == 0
    assert program.num_launches <= 3  # two of them are the plan
    assert program.temp_bytes < 100_000  # no copy of weights
    make_plan = functools.partial(plan, num_rows=num_rows, tile_rows=tile_rows(num_rows, 128))
    assert compile_for_h200(layer, *shapes, sizes, jax.eval_shape(make_plan, sizes)).num_launches == 1


SHAPES_ON_A_GPU = [
    {"outputs": 768, "depth": 2048, "is_gated": True},
    {"outputs": 2048, "depth": 768},
    {"outputs": 200, "depth": 320, "is_gated": True, "has_bias": True},
    {"outputs": 72, "depth": 64, "has_bias": True},
]


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", SHAPES_ON_A_GPU, ids=str)
@pytest.mark.parametrize("case", ON_A_GPU)
def test_on_a_gpu(case, shape, dtype):
    arguments, options, want = make_case(**ON_A_GPU[case], **shape, dtype=dtype)
    got, again = (grouped_matmul(*arguments, **options, implementation="sm90") for _ in range(2))
    check(got, want)
    assert (got[: len(want)] == again[: len(want)]).all()
