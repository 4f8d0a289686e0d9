"""Matmuls of quantized weights and few rows for Hopper (sm_90a), in Mosaic GPU, in sequence in one kernel.

Weights are operand A of wgmma, converted to bfloat16 in registers; rows, which lie in shared memory, are operand B. So
the product is [outputs, rows], and rows are padded to a multiple of 8 only.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.device.codes import TABLES, codes_per_byte
from pallas_kernels.device.product_of_codes import BYTES, OUTPUTS, PIECE, SMALLEST_GROUP, UNIT
from pallas_kernels.device.products import Product, Weights, products_of_layer
from pallas_kernels.device.swizzled import tiled, views
from pallas_kernels.hopper import BY_LANES, NUM_SMS, SHARED_MEMORY, num_sms
from pallas_kernels.quantized_matmuls import device
from pallas_kernels.quantized_matmuls.kernel import kernel
from pallas_kernels.quantized_matmuls.matrix import QuantizedMatrix, scaling_of, vectors_of_outputs, why_not_factors
from pallas_kernels.quantized_matmuls.problem import NUM_COMPUTE, TILE, Matmul, Problem, Shared

MAX_ROWS = 64
MAX_X_SLOTS = 4


def cut(product: Product) -> Matmul:
    """Return how a matmul is cut into units, of 32 KiB of codes each."""
    weight = product.weight
    block_k = BYTES * codes_per_byte(weight.code)

    units = -(-weight.num_outputs // TILE) * -(-weight.depth // block_k)
    return Matmul(
        name=product.name,
        x=product.x,
        y=product.y,
        outputs=weight.num_outputs,
        is_gated=weight.is_gated,
        scaling=scaling_of(weight, product.name),
        norm=product.norm,
        squares=product.squares,
        num_ctas=min(NUM_SMS, units),
    )


def run_products(
    products: Sequence[Product],
    values: dict[str, Any],
    *,
    num_rows: int,
    activation: Callable[[Array], Array] | None,
    eps: float,
    output_dtype: Any = jnp.bfloat16,
) -> dict[str, Array]:
    """Run one kernel for the products on the named arrays `values`, and return its outputs by name.

    `num_rows` of each array of rows are at most 8, or a multiple of it.
    """
    rows = -(-num_rows // 8) * 8
    matmuls = tuple(cut(product) for product in products)
    block_k = max(matmul.block_k for matmul in matmuls)
    x_bytes = rows * block_k * 2
    x_slots = max(3, min(MAX_X_SLOTS, 64 * 1024 // x_bytes))
    w_slots = (SHARED_MEMORY - 2048 - x_slots * x_bytes) // (TILE * BYTES)
    problem = Problem(matmuls=matmuls, rows=rows, w_slots=w_slots, x_slots=x_slots, activation=activation, eps=eps)

    inputs: dict[str, Any] = {}
    outputs: dict[str, jax.ShapeDtypeStruct] = {}
    for product, matmul in zip(products, matmuls, strict=True):
        weight = product.weight
        vectors = vectors_of_outputs(weight, matmul.scaling)
        values = values | vectors | {matmul.name: lax.bitcast_convert_type(weight.codes, jnp.int8)}
        names = [matmul.x, matmul.name, *vectors, matmul.squares]
        if matmul.norm is not None:
            names += [matmul.norm.residual, matmul.norm.gain]
        inputs |= {name: values[name] for name in names if name is not None and name not in outputs}
        is_last = matmul is matmuls[-1]
        width = matmul.outputs // 2 if matmul.is_gated else matmul.outputs
        outputs[matmul.y] = jax.ShapeDtypeStruct((num_rows, width), output_dtype if is_last else jnp.bfloat16)
        if matmul.norm is not None:
            outputs[matmul.norm.normed] = jax.ShapeDtypeStruct((num_rows, width), jnp.bfloat16)
            outputs[matmul.norm.squares] = jax.ShapeDtypeStruct((matmul.outputs // OUTPUTS, rows), jnp.float32)
    # As the counters: equal before and after each kernel, which is why all of a program's have the same ones.
    shape = (NUM_SMS * problem.max_tiles * NUM_COMPUTE, problem.num_chunks, 128, 4)
    inputs["parts"] = jnp.full(shape, np.uint32(device.EMPTY).astype(np.int32), jnp.int32)
    if len(matmuls) > 1:
        inputs["finished"] = jnp.zeros((len(matmuls),), jnp.int32)
        outputs["last_counter"] = jax.ShapeDtypeStruct((1,), jnp.int32)

    def body(*refs: Any) -> None:
        arrays, shared = refs[: len(inputs) + len(outputs)], refs[len(inputs) + len(outputs) :]
        (weights, boxes), *others = shared
        kernel(problem, dict(zip([*inputs, *outputs], arrays, strict=True)), Shared(weights, boxes, *others))

    results = plgpu.kernel(
        body,
        kernel_name="quantized_matmuls",
        out_type=tuple(outputs.values()),
        scratch_types=(
            *_shared_memory(problem, block_k),
            plgpu.Barrier(num_barriers=w_slots, num_arrivals=2),
            plgpu.Barrier(num_barriers=w_slots, num_arrivals=NUM_COMPUTE),
            plgpu.Barrier(num_barriers=x_slots),
            plgpu.Barrier(num_barriers=x_slots),
            plgpu.Barrier(num_barriers=x_slots, num_arrivals=NUM_COMPUTE),
            plgpu.Barrier(num_barriers=len(matmuls)),
        ),
        grid=(NUM_SMS,),
        grid_names=("cta",),
        num_threads=NUM_COMPUTE + 2,
        thread_name="wg",
        compiler_params=BY_LANES,
    )(*inputs.values())
    return dict(zip(outputs, results, strict=True))


def _shared_memory(problem: Problem, block_k: int) -> tuple[Any, ...]:
    ring = views(problem.w_slots, TILE, BYTES, dtype=jnp.int8)
    rows = plgpu.SMEM((problem.x_slots, problem.rows, block_k), jnp.bfloat16, transforms=tiled(block_k))
    factors = plgpu.SMEM((len(problem.matmuls), problem.rows), jnp.float32)
    return ring, rows, factors, plgpu.SMEM((NUM_COMPUTE + 1, 4, device.COLUMNS), jnp.float32)


def _pad(x: Float[Array, "M E"]) -> Float[Array, "R C"]:
    """Pad rows to a multiple of 8, since TMA can cut off only within one group of 8; many of them to one of 16, since
    the warpgroup that puts columns of 40 or 56 rows in order would spill registers. Pad columns to a multiple of PIECE.
    """
    num_rows = 0 if len(x) <= 8 else -len(x) % (8 if len(x) <= 32 else 16)
    return jnp.pad(x, ((0, num_rows), (0, -x.shape[1] % PIECE)))


@functools.partial(jax.jit, static_argnames=("activation", "eps"))
def layer_sm90(
    heads: Float[Array, "M A"],
    residual: Float[Array, "M E"],
    weights: Weights,
    gains: tuple[Float[Array, " E"], Float[Array, " E"]],
    *,
    activation: Callable[[Array], Array],
    eps: float,
) -> tuple[Float[Array, "M E"], Float[Array, "M N"]]:
    """See `quantized_layer_matmuls`."""
    values = {
        "heads": _pad(heads),
        "stream": _pad(residual),
        "mlp_gain": gains[0].reshape(-1, 1),
        "next_gain": gains[1].reshape(-1, 1),
    }
    products = products_of_layer(weights)
    num_rows = len(residual)
    results = run_products(products, values, num_rows=len(values["stream"]), activation=activation, eps=eps)
    stream = results["residual"][:num_rows]
    if weights.qkv is not None:
        return stream, results["y"][:num_rows]
    normed, squares = results["normed"][:num_rows].astype(jnp.float32), results["squares"][:, :num_rows]
    mean_square = jnp.sum(squares, axis=0)[:, None] / normed.shape[1]
    return stream, (normed * jax.lax.rsqrt(mean_square + eps)).astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnames=("activation", "output_dtype"))
def matmul_sm90(
    x: Float[Array, "M K"],
    weight: QuantizedMatrix,
    *,
    activation: Callable[[Array], Array] | None,
    output_dtype: Any,
) -> Float[Array, "M N"]:
    """See `quantized_matmul`."""
    values = {"x": _pad(x)}
    results = run_products(
        [Product("w", "x", "y", weight)],
        values,
        num_rows=len(values["x"]),
        activation=activation,
        eps=0.0,
        output_dtype=output_dtype,
    )
    return results["y"][: len(x)]


def why_not_rows(x: Any) -> str | None:
    """Return why the kernel cannot multiply such rows, or None if it can."""
    if num_sms() < NUM_SMS:
        return f"a GPU of {NUM_SMS} multiprocessors, whose thread blocks run at once: {num_sms()}"
    if not 0 < len(x) <= MAX_ROWS:
        return f"1 to {MAX_ROWS} rows, got {len(x)}"
    return None if x.dtype == jnp.bfloat16 else f"rows of bfloat16, got {x.dtype}"


def why_not_matrix(weight: QuantizedMatrix) -> str | None:
    """Return why the kernel cannot multiply by such a weight, or None if it can."""
    block = BYTES * codes_per_byte(weight.code)
    if weight.num_outputs % OUTPUTS or weight.depth % UNIT or weight.depth < block:
        return (
            f"outputs in multiples of {OUTPUTS} and K of {UNIT}, at least {block}, "
            f"got {weight.num_outputs} and {weight.depth}"
        )
    group = weight.group_size
    if group != weight.depth and group % block and (group % SMALLEST_GROUP or block % group):
        return f"scales of all columns, of {SMALLEST_GROUP} to {block} that divide these, or of multiples, got {group}"
    if reason := why_not_factors(weight, block):
        return reason
    if weight.zeros is not None and weight.code not in ("uint4", "int8"):
        return f"zero points of uint4 and int8, got {weight.code}"
    if weight.minimums is not None and weight.code in TABLES:
        return f"minimums of integers, got {weight.code}"
    if weight.zeros is None and weight.minimums is None and weight.code == "uint4":
        return "uint4 with zero points or minimums"
    return None


def why_not_matrix_of_layer(weight: QuantizedMatrix) -> str | None:
    """Return why the kernel cannot multiply what another matmul has stored by such a weight, or None if it can."""
    if weight.depth % PIECE:
        return f"K in multiples of {PIECE}, got {weight.depth}"
    return why_not_matrix(weight)
