"""What codes are scaled by: numbers of groups of columns, how a thread loads them, and products of blocks with them.

A warpgroup has 64 outputs, the rows of WGMMA layout, and a number of each of them is [64, 8] with equal columns.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.codes import Code, codes_per_byte, float_of
from pallas_kernels.device.mlir import REF, SCALAR, const_i32, elements_of, inline, splat, value_of, vector_of
from pallas_kernels.device.product_of_codes import BYTES, OUTPUTS, PIECE, add_product, factor_of_sums
from pallas_kernels.device.registers import CHUNK, at, chunk_of, matrix_of, registers_for
from pallas_kernels.jax_internals import arith, ir, llvm, vector

MAX_ROWS_TO_LOAD_AHEAD, MAX_WORDS_TO_LOAD_AHEAD = 32, 8
"""With more rows, or more words of scales, zero points and minimums of an output in a step, there are no registers for
those of the next step.
"""
VECTORS_OF_A_PART = 4
"""With more scales, zero points and minimums a step, parts of its columns are multiplied one after the other."""

_int = jnp.int32
_LAYOUT = plgpu.Layout.WGMMA


class Vectors(NamedTuple):
    """An array in global memory that has a number for each group of columns of an output: [outputs, groups]."""

    name: str
    dtype: str
    """Name of the type; those of a byte are stored as int8."""
    group_size: int

    def count(self, block_k: int) -> int:
        """Return how many numbers of an output belong to a block of so many columns."""
        return max(1, block_k // self.group_size)

    def first(self, k: Any, block_k: int) -> Any:
        """Return the index of the first number that belongs to a block's columns, block `k` of K."""
        if self.group_size <= block_k:
            return k * self.count(block_k)
        return lax.div(k, _int(self.group_size // block_k))


class Scaling(NamedTuple):
    """What the codes of a weight are scaled by, see `QuantizedMatrix`; None for what the weight does not have."""

    code: Code
    depth: int
    """Columns of the weight."""
    scales: Vectors
    zeros: Vectors | None
    minimums: Vectors | None
    factors: Vectors | None
    minimum_factors: Vectors | None

    @property
    def block_k(self) -> int:
        """Columns of a block."""
        return BYTES * codes_per_byte(self.code)

    @property
    def all_vectors(self) -> list[Vectors]:
        """Scales and what belongs to them."""
        found = (self.scales, self.zeros, self.minimums, self.factors, self.minimum_factors)
        return [vectors for vectors in found if vectors is not None]

    @property
    def output_scales(self) -> Vectors | None:
        """Those of the vectors that an output's sum is multiplied by, because all of its columns have one of them."""
        if self.zeros is not None or self.minimums is not None:
            return None
        vectors = self.scales if self.factors is None else self.factors
        return vectors if vectors.group_size == self.depth else None

    @property
    def vectors_of_blocks(self) -> list[Vectors]:
        """Those of the vectors that are loaded for each block of columns."""
        return [vectors for vectors in self.all_vectors if vectors != self.output_scales]

    @property
    def num_scales(self) -> int:
        """Scales of a block's columns; 0 if an output has only one, which its sum is multiplied by."""
        return self.scales.count(self.block_k) if self.scales in self.vectors_of_blocks else 0

    @property
    def has_minimums(self) -> bool:
        """True if something is subtracted from products of codes and scales: zero points of bytes are, too."""
        return self.minimums is not None or (self.zeros is not None and self.code == "int8")

    @property
    def is_mxfp4(self) -> bool:
        """True if codes are of e2m1 and scales powers of two of 32 columns, and nothing else belongs to them."""
        scales = self.scales
        return (
            self.code == "e2m1"
            and (scales.dtype, scales.group_size) == ("float8_e8m0fnu", 32)
            and self.vectors_of_blocks == [scales]
            and self.factors is None
        )

    @property
    def is_centred(self) -> bool:
        """True if codes are converted as those less 8: products and minimums, rounded to bfloat16, are smaller."""
        return self.code == "uint4" and self.zeros is None

    def factor_of_sums(self, rows: int) -> float:
        """Return what the sums of all blocks are multiplied by."""
        return factor_of_sums(
            self.code,
            rows=rows,
            num_scales=self.num_scales,
            group_size=self.block_k // max(1, self.num_scales),
            has_minimums=self.has_minimums,
        )

    def combined(self, found: Mapping[str, tuple[Any, ...]]) -> list[Any]:
        """Return a block's scales, zero points and minimums as `add_product` takes them, of vectors by their names."""

        def of(vectors: Vectors | None, factors: Vectors | None = None) -> list[Any]:
            values = found.get(vectors.name, ()) if vectors is not None else ()
            by = found.get(factors.name) if factors is not None else None
            if by is None:
                return list(values)
            return [value * by[index * len(by) // len(values)] for index, value in enumerate(values)]

        scales, zeros, minimums = (
            of(self.scales, self.factors),
            of(self.zeros),
            of(self.minimums, self.minimum_factors),
        )
        if self.code == "int8" and zeros:
            products = [zero * scale for zero, scale in zip(zeros, scales, strict=True)]
            zeros, minimums = [], [a + b for a, b in zip(minimums, products, strict=True)] if minimums else products
        elif self.is_centred:
            minimums = [minimum - 8.0 * scale for minimum, scale in zip(minimums, scales, strict=True)]
        return [*scales, *zeros, *minimums]


class ScaledProduct:
    """The products of a warpgroup's blocks of codes and rows, scaled.

    `words_ahead` are those of an output for which there are registers while the block before is multiplied.
    `add_product` and `vectors_of` are those of this folder, or what a test emulates them by.
    """

    def __init__(
        self,
        scaling: Scaling,
        *,
        rows: int,
        is_gated: bool,
        has_pieces_apart: bool = False,
        words_ahead: int = MAX_WORDS_TO_LOAD_AHEAD,
        add_product: Callable[..., Any] = add_product,
        vectors_of: Callable[..., Any],
    ) -> None:
        self.scaling, self.vectors_of = scaling, vectors_of
        self.vectors = scaling.vectors_of_blocks
        self.counts = [each.count(scaling.block_k) for each in self.vectors]
        sizes = [count * jnp.dtype(each.dtype).itemsize for count, each in zip(self.counts, self.vectors, strict=True)]
        num_words = sum(-(-size // 4) for size in sizes)
        self.loads_ahead = rows <= MAX_ROWS_TO_LOAD_AHEAD and num_words <= words_ahead
        """True if a block's words are to be loaded while the one before it is multiplied."""
        has_zeros = scaling.zeros is not None and scaling.code == "uint4"
        num_parts = scaling.num_scales * (1 + has_zeros + scaling.has_minimums) // VECTORS_OF_A_PART
        self.num_parts = min(1 << max(0, num_parts.bit_length() - 1), scaling.block_k // PIECE)
        self.products = [
            add_product(
                "int4" if scaling.is_centred else scaling.code,
                rows=rows,
                is_gated=is_gated,
                num_scales=scaling.num_scales // self.num_parts,
                has_zeros=has_zeros,
                has_minimums=scaling.has_minimums,
                has_pieces_apart=has_pieces_apart,
                part_of_k=(part, self.num_parts),
            )
            for part in range(self.num_parts)
        ]

    def load(self, load_words: Callable[..., Any], block: Any, part: int | None = None) -> tuple[Any, ...]:
        """Return the words of a block, or of a part of it, by `load_words(vectors, column, count)` for each array."""
        words = []
        for each, count in zip(self.vectors, self.counts, strict=True):
            own = range(count) if part is None else self._own_part(count, part)
            column = each.first(block, self.scaling.block_k) + own.start
            words.append(load_words(each, column, len(own)))
        return tuple(words)

    def sums(self, zeros, load, rows, place, *, at, first, steps) -> Any:
        """Return `zeros` plus the products of `steps` blocks, those of the rings' steps from `first` on.

        `load(step, part)` is the method `load` for a step's block. `place(slot)` is where `add_product` finds a slot's
        rows in their ring `rows`. `at` has the warpgroup, the rings and their sizes.
        """
        problem, smem = at.problem, at.smem

        def one_step(k, carry):
            sums, *words = carry
            following = load(k + 1) if self.loads_ahead else ()
            words = words if self.loads_ahead else load(k, 0)
            w_slot, x_slot = (lax.rem(first + k, _int(slots)) for slots in (problem.w_slots, problem.x_slots))
            plgpu.barrier_wait(smem.w_full.at[w_slot])
            plgpu.barrier_wait(smem.x_ready.at[x_slot])
            slot, warpgroup, piece = map(splat, (w_slot, at.warpgroup, place(x_slot)))
            load_part = functools.partial(load, k)
            sums = self._add(sums, words, load_part, smem.weights, slot, warpgroup, rows, piece)
            plgpu.barrier_arrive(smem.w_free.at[w_slot])
            plgpu.barrier_arrive(smem.x_free.at[x_slot])
            return sums, *following

        return lax.fori_loop(_int(0), steps, one_step, (zeros, *(load(0) if self.loads_ahead else ())))[0]

    def _add(self, sums: Any, words: Any, load_part: Callable[[int], Any], *operands: Any) -> Any:
        """Return the sums with a block's product, of the `operands` of `add_product` that follow the sums.

        `words` are those of the block if it `loads_ahead`, else of its first part; `load_part` loads those of others.
        """
        for part, product in enumerate(self.products):
            words = words if self.loads_ahead or part == 0 else load_part(part)
            found = {}
            for each, own, count in zip(self.vectors, words, self.counts, strict=True):
                indices = self._own_part(count, part)
                indices = indices if self.loads_ahead else range(len(indices))
                found[each.name] = self.vectors_of(own, indices, each.dtype)
            sums = product(sums, *operands, *self.scaling.combined(found))
        return sums

    def _own_part(self, count: int, part: int) -> range:
        """Return the indices of a part's numbers among those of a block; one may be for several parts."""
        first = count * part // self.num_parts
        return range(first, max(first + 1, count * (part + 1) // self.num_parts))


def load_words(
    ref: Any, places: tuple[Any, ...], column: Any, *, count: int, output: Callable[..., Any]
) -> tuple[Any, ...]:
    """Return ref[outputs of a thread, column : column + count] in as few registers as hold them, for `vectors_of`.

    `output(half, *places)` is the index of a thread's output in a half of its registers. Each array has two words of a
    thread's either output. `column` is a multiple of `count`; where it is beyond the last one, there are others'
    numbers.
    """
    itemsize, row_bytes = jnp.dtype(ref.dtype).itemsize, ref.shape[1] * jnp.dtype(ref.dtype).itemsize
    num_bytes = count * itemsize
    size = math.gcd(num_bytes, row_bytes, 16)
    num_arrays = -(-num_bytes // 8)
    out = (plgpu.ShapeDtypeStruct((OUTPUTS, 8), jnp.int32, layout=_LAYOUT),) * num_arrays

    def run(_, ref, column, *places):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        if size > 4:
            loaded_type = ir.VectorType.get((size // 4,), i32)
        else:
            loaded_type = ir.IntegerType.get_signless(8 * size)
        pointer = utils.memref_ptr(ref)
        base = llvm.ptrtoint(i64, pointer)
        first_byte = arith.muli(value_of(column), const_i32(itemsize))
        arrays = [registers_for(8) for _ in range(num_arrays)]
        for half in range(2):
            own = output(half, *map(value_of, places))
            row = arith.muli(arith.extui(i64, own), mgpu.c(row_bytes, i64))
            words = [const_i32(0)] * (2 * num_arrays)
            for start in range(0, num_bytes, size):
                byte = arith.minsi(arith.addi(first_byte, const_i32(start)), const_i32(row_bytes - size))
                address = arith.addi(arith.addi(base, row), arith.extui(i64, byte))
                found = llvm.load(loaded_type, llvm.inttoptr(pointer.type, address), alignment=size)
                place = start // 4
                if size > 4:
                    words[place : place + size // 4] = elements_of(found, size // 4)
                elif size == 4:
                    words[place] = found
                else:
                    shifted = arith.shli(arith.extui(i32, found), const_i32(8 * (start % 4)))
                    words[place] = arith.ori(words[place], shifted)
            for index, array in enumerate(arrays):
                array[at(0, half)] = vector_of(words[2 * index : 2 * index + 2])
        return tuple(matrix_of(array, is_signed=True) for array in arrays)

    return inline(run, REF, *[SCALAR] * (1 + len(places)), out=out)(ref, splat(column), *map(splat, places))


def vectors_of(words: tuple[Any, ...], indices: range, dtype: str) -> tuple[Any, ...]:
    """Return the numbers at these indices of those that `load_words` has loaded, of a type: [64, 8] of float32 each."""

    def run(_, *words):
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        chunks = []
        for index in indices:
            per_word = 4 // jnp.dtype(dtype).itemsize
            registers = []
            for half in range(2):
                array = words[index // per_word // 2].registers[at(0, half)]
                word = vector.extract(array, [], [index // per_word % 2])
                registers.append(vector.broadcast(pair, float_of(word, index % per_word, dtype)))
            chunks.append(chunk_of(registers))
        return tuple(chunks)

    return inline(run, *[_LAYOUT] * len(words), out=(CHUNK,) * len(indices))(*words)
