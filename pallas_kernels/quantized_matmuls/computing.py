"""The warpgroups that multiply, add up the parts of a tile and finish its pieces, see kernel.py."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import counters
from pallas_kernels.device.product_of_codes import OUTPUTS
from pallas_kernels.device.registers import halves
from pallas_kernels.device.scaling import ScaledProduct, vectors_of
from pallas_kernels.quantized_matmuls import device
from pallas_kernels.quantized_matmuls.problem import (
    MAX_ROWS_IN_REGISTERS,
    NUM_COMPUTE,
    PARTS_AT_A_TIME,
    PARTS_OF_MANY_ROWS,
    Block,
    Matmul,
    units,
)

_int = jnp.int32


def compute(block: Block, index: int, matmul: Matmul, first: Any) -> Any:
    """Multiply a block's units and finish the pieces that are its own."""
    start, end = units(block, matmul)
    steps = _int(matmul.steps)
    first_tile = lax.div(start, steps)
    num_tiles = lax.div(end + (matmul.steps - 1), steps) - first_tile
    num_chunks = block.problem.num_chunks
    finishes_in_registers = block.problem.rows <= MAX_ROWS_IN_REGISTERS
    parts = block.gmem["parts"]

    def finished(tile, number) -> None:
        """Tell others of so many chunks, if the tile has outputs of this warpgroup."""
        if index < len(block.problem.matmuls) - 1:

            @pl.when((number > 0) & ((tile * NUM_COMPUTE + block.warpgroup) * OUTPUTS < matmul.outputs))
            def _():
                counters.add(block.finished(index), number)

    @pl.loop(0, num_tiles)
    def _(number):
        tile = first_tile + number
        low, high = lax.max(start, tile * steps), lax.min(end, (tile + 1) * steps)
        sums = _multiply(block, matmul, tile, low - tile * steps, first + low - start, high - low)
        if index:

            @pl.when(number == 0)
            def _():
                plgpu.barrier_wait(block.smem.ready.at[index])

        _, num_parts = _owners(matmul, tile)
        part = _part(block, matmul, block.cta, tile)
        if finishes_in_registers:

            @pl.when(num_parts == 1)
            def _():
                for chunk in range(num_chunks):
                    columns = sums[:, chunk * device.COLUMNS : (chunk + 1) * device.COLUMNS]
                    operands = _load_operands(block, index, matmul, tile, _int(chunk))
                    _finish(block, matmul, tile, _int(chunk), columns, operands)
                finished(tile, num_chunks)

            @pl.when(num_parts > 1)
            def _():
                device.store_part(parts, sums, part)

        else:
            device.store_part(parts, sums, part)

    @pl.loop(0, num_tiles)
    def _(number):
        tile = first_tile + number
        first_owner, num_parts = _owners(matmul, tile)
        own = block.cta - first_owner

        @pl.when(num_parts > (1 if finishes_in_registers else 0))
        def _():
            places = tuple(_part(block, matmul, first_owner + part, tile) for part in range(2))
            most = PARTS_AT_A_TIME if finishes_in_registers else PARTS_OF_MANY_ROWS

            @pl.loop(0, num_chunks)
            def _(chunk):
                @pl.when(own == lax.rem(chunk, num_parts))
                def _():
                    operands = _load_operands(block, index, matmul, tile, chunk)
                    total = _sum_of_parts(block, places, num_parts, chunk, most=most)
                    _finish(block, matmul, tile, chunk, total, operands)

            finished(tile, lax.div(num_chunks - own + (num_parts - 1), num_parts))

    return first + end - start


def _owners(matmul: Matmul, tile: Any) -> tuple[Any, Any]:
    """Return the first block that has a part of a tile, and how many have one."""
    steps = _int(matmul.steps)
    first_owner = matmul.owner(tile * steps)
    return first_owner, matmul.owner((tile + 1) * steps - 1) - first_owner + 1


def _part(block: Block, matmul: Matmul, cta: Any, tile: Any) -> Any:
    """Return the index of what a block has summed up of a tile; its tiles follow one another."""
    own = tile - lax.div(matmul.first_unit(cta), _int(matmul.steps))
    return (cta * block.problem.max_tiles + own) * NUM_COMPUTE + block.warpgroup


def _sum_of_parts(block: Block, places: tuple[Any, ...], number: Any, chunk: Any, *, most: int) -> Any:
    """Return [64, 8], the sum of a tile's parts in their order, of which `most` are loaded at a time.

    `places` are those of the first two parts. For all blocks but the first that has one it is their first tile, so that
    parts are equally far apart from the second on.
    """
    first, second = places
    stride = block.problem.max_tiles * NUM_COMPUTE
    parts = block.gmem["parts"]

    def add(batch, total):
        start = batch * most
        own = lax.min(number - start, _int(most))
        following = second + start * stride
        place = lax.select(batch == 0, first, following - stride)
        return total + device.load_sum(parts, place, following, own, chunk, stride=stride, most=most)

    zeros = plgpu.layout_cast(jnp.zeros((OUTPUTS, device.COLUMNS), jnp.float32), plgpu.Layout.WGMMA)
    return lax.fori_loop(_int(0), lax.div(number + (most - 1), _int(most)), add, zeros)


def _multiply(block: Block, matmul: Matmul, tile: Any, first_k: Any, first: Any, num_steps: Any) -> Any:
    """Return this warpgroup's sums [64, rows] of a tile, over steps of the ring from `first`, of K from `first_k`."""
    problem, gmem = block.problem, block.gmem
    piece = _piece(block, matmul, tile)
    product = ScaledProduct(matmul.scaling, rows=problem.rows, is_gated=matmul.is_gated, vectors_of=vectors_of)

    def load_words(vectors, column, count):
        return device.load_words(gmem[vectors.name], piece, column, count=count, up=matmul.up)

    def load(number, part=None):
        """Load the scales of a step or a part of it, and what belongs to them."""
        return product.load(load_words, first_k + number, part)

    zeros = plgpu.layout_cast(jnp.zeros((OUTPUTS, problem.rows), jnp.float32), plgpu.Layout.WGMMA)
    return product.sums(zeros, load, block.smem.rows, lambda slot: slot, at=block, first=first, steps=num_steps)


def _piece(block: Block, matmul: Matmul, tile: Any) -> Any:
    """Return which 64 of the outputs are this warpgroup's of a tile: of those past the last one, the last 64."""
    return lax.min(tile * NUM_COMPUTE + block.warpgroup, _int(matmul.outputs // OUTPUTS - 1))


class _Operands(NamedTuple):
    """The operands of a piece besides its sums, [64, 8] each; None for those that the matmul does not have."""

    scale: Any
    factor: Any
    residual: Any
    gain: Any


def _load_operands(block: Block, index: int, matmul: Matmul, tile: Any, chunk: Any) -> _Operands:
    """Load the operands of a piece besides its sums; the last outputs are repeated for those beyond them."""
    gmem, norm = block.gmem, matmul.norm
    piece = _piece(block, matmul, tile)

    def vector(name: str, up: int | None = None, dtype: str | None = None) -> Any:
        return device.outputs_vector(gmem[name], piece, up=up, dtype=dtype)

    scales = matmul.scaling.output_scales
    return _Operands(
        scale=None if scales is None else vector(scales.name, matmul.up, scales.dtype),
        factor=None if matmul.squares is None else device.rows_vector(block.smem.factors.at[index], chunk),
        residual=None if norm is None else device.load_transposed(gmem[norm.residual], piece * OUTPUTS, chunk),
        gain=None if norm is None else vector(norm.gain),
    )


def _finish(block: Block, matmul: Matmul, tile: Any, chunk: Any, sums: Any, operands: _Operands) -> None:
    """Compute 64 outputs of 8 rows from their sums: everything after the product."""
    gmem, norm = block.gmem, matmul.norm
    piece = tile * NUM_COMPUTE + block.warpgroup
    first = piece * OUTPUTS

    @pl.when(first < matmul.outputs)
    def _():
        factor = matmul.scaling.factor_of_sums(block.problem.rows)
        y = sums if factor == 1 else sums * factor
        for factor in (operands.scale, operands.factor):
            y = y if factor is None else y * factor
        if norm is not None:
            y = (y + operands.residual).astype(gmem[matmul.y].dtype).astype(jnp.float32)  # as it is stored
            device.store_transposed(gmem[norm.normed], y * operands.gain, first, chunk)
            device.store_squares(gmem[norm.squares], y, piece, chunk, block.smem.scratch.at[block.warpgroup])
            device.store_transposed(gmem[matmul.y], y, first, chunk)
        elif matmul.is_gated:
            assert block.problem.activation is not None
            gate, up = halves(y)
            y = block.problem.activation(gate) * up
            device.store_transposed(gmem[matmul.y], y, lax.div(first, _int(2)), chunk, half=0)
        else:
            device.store_transposed(gmem[matmul.y], y, first, chunk)
