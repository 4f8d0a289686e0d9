"""Matmuls of quantized weights and few rows for Hopper (sm_90a), in Mosaic GPU, one after the other in one kernel.

Weights are operand A of wgmma, converted to bfloat16 in registers; rows, which lie in shared memory, are operand B. So
the product is [outputs, rows], and rows are padded to a multiple of 8 only.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.hopper import NUM_SMS, SHARED_MEMORY, num_sms
from pallas_kernels.quantized_matmuls import device
from pallas_kernels.quantized_matmuls.kernel import NUM_COMPUTE, TILE, Matmul, Norm, Problem, Shared, kernel
from pallas_kernels.quantized_matmuls.matrix import QuantizedMatrix, as_bytes
from pallas_kernels.quantized_matmuls.packing import BLOCK_COLUMNS, BLOCK_OUTPUTS, CODE_ROWS

MAX_ROWS = 64
MAX_X_SLOTS = 4


class Product(NamedTuple):
    """A matmul, not yet cut; see `Matmul`."""

    name: str
    x: str
    y: str
    weight: QuantizedMatrix
    bias: str | None = None
    norm: Norm | None = None
    squares: str | None = None


def cut(product: Product) -> Matmul:
    """Return how a matmul is cut into units, of 32 KiB of codes each."""
    weight = product.weight
    outputs, depth = weight.num_outputs, weight.depth
    block_k = 256 if weight.is_packed else 128
    units = -(-outputs // TILE) * -(-depth // block_k)
    num_ctas = min(NUM_SMS, units)
    return Matmul(
        name=product.name,
        x=product.x,
        y=product.y,
        depth=depth,
        outputs=outputs,
        code=weight.code,
        scale_rows=weight.scale_rows,
        block_k=block_k,
        is_gated=weight.is_gated,
        scale=None if weight.scales is None else f"scale_{product.name}",
        has_scaled_blocks=weight.scales is not None and weight.scales.shape[-1] > 1,
        bias=product.bias,
        norm=product.norm,
        squares=product.squares,
        num_ctas=num_ctas,
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
    """Return what one kernel writes for the products, of what is there before it, by the names of arrays."""
    rows = -(-num_rows // 8) * 8
    matmuls = tuple(cut(product) for product in products)
    [(is_packed, scale_rows)] = {(product.weight.is_packed, product.weight.scale_rows) for product in products}
    block_k = matmuls[0].block_k
    slot_shape: tuple[int, ...] = (TILE, block_k)
    if is_packed:
        slot_shape = NUM_COMPUTE, block_k // BLOCK_COLUMNS, CODE_ROWS + scale_rows, 32
    slot_bytes = math.prod(slot_shape) * (4 if is_packed else 1)
    x_bytes = rows * block_k * 2
    x_slots = max(2, min(MAX_X_SLOTS, 64 * 1024 // x_bytes))
    w_slots = (SHARED_MEMORY - 2048 - x_slots * x_bytes) // slot_bytes
    problem = Problem(matmuls=matmuls, rows=rows, w_slots=w_slots, x_slots=x_slots, activation=activation, eps=eps)

    inputs: dict[str, Any] = {}
    outputs: dict[str, jax.ShapeDtypeStruct] = {}
    for product, matmul in zip(products, matmuls, strict=True):
        weight = product.weight
        values = values | {matmul.name: weight.values if is_packed else as_bytes(weight.values)}
        if matmul.scale is not None:
            assert weight.scales is not None
            values[matmul.scale] = weight.scales.reshape(matmul.outputs, -1)
        names = [matmul.x, matmul.name, matmul.scale, matmul.bias, matmul.squares]
        if matmul.norm is not None:
            names += [matmul.norm.residual, matmul.norm.gain]
        inputs |= {name: values[name] for name in names if name is not None and name not in outputs}
        is_last = matmul is matmuls[-1]
        width = matmul.outputs // 2 if matmul.is_gated else matmul.outputs
        outputs[matmul.y] = jax.ShapeDtypeStruct((num_rows, width), output_dtype if is_last else jnp.bfloat16)
        if matmul.norm is not None:
            outputs[matmul.norm.normed] = jax.ShapeDtypeStruct((num_rows, width), jnp.bfloat16)
            outputs[matmul.norm.squares] = jax.ShapeDtypeStruct((matmul.outputs // BLOCK_OUTPUTS, rows), jnp.float32)
        num_parts = matmul.num_tiles * matmul.max_parts * NUM_COMPUTE
        outputs[f"parts_{matmul.name}"] = jax.ShapeDtypeStruct((num_parts, problem.num_chunks, 128, 4), jnp.float32)
    inputs["counters"] = jnp.zeros((problem.counters_of(len(matmuls)),), jnp.int32)
    if len(matmuls) > 1:
        inputs["finished"] = jnp.zeros((len(matmuls),), jnp.int32)
        outputs["last_counter"] = jax.ShapeDtypeStruct((1,), jnp.int32)

    def body(*refs: Any) -> None:
        arrays, shared = refs[: len(inputs) + len(outputs)], refs[len(inputs) + len(outputs) :]
        kernel(problem, dict(zip([*inputs, *outputs], arrays, strict=True)), Shared(*shared))

    results = plgpu.kernel(
        body,
        kernel_name="quantized_matmuls",
        out_type=tuple(outputs.values()),
        scratch_types=(
            *_shared_memory(problem, slot_shape, is_packed),
            plgpu.Barrier(num_barriers=w_slots, num_arrivals=2),
            plgpu.Barrier(num_barriers=w_slots, num_arrivals=NUM_COMPUTE),
            plgpu.Barrier(num_barriers=x_slots),
            plgpu.Barrier(num_barriers=x_slots, num_arrivals=NUM_COMPUTE),
            plgpu.Barrier(num_barriers=len(matmuls)),
        ),
        grid=(NUM_SMS,),
        grid_names=("cta",),
        num_threads=NUM_COMPUTE + 2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(*inputs.values())
    return dict(zip(outputs, results, strict=True))


def _shared_memory(problem: Problem, slot_shape: tuple[int, ...], is_packed: bool) -> tuple[Any, ...]:
    block_k = problem.matmuls[0].block_k
    # Any: pyright takes them for abstract classes.
    tiling, swizzle = cast(Any, plgpu.TilingTransform), cast(Any, plgpu.SwizzleTransform)(128)
    shape = problem.w_slots, *slot_shape
    if is_packed:
        ring = plgpu.SMEM(shape, jnp.int32)
    else:
        ring = plgpu.SMEM(shape, jnp.int8, transforms=(tiling((8, 128)), swizzle))
    rows = plgpu.SMEM((problem.x_slots, problem.rows, block_k), jnp.bfloat16, transforms=(tiling((8, 64)), swizzle))
    factors = plgpu.SMEM((len(problem.matmuls), problem.rows), jnp.float32)
    return ring, rows, factors, plgpu.SMEM((NUM_COMPUTE + 1, 4, device.COLUMNS), jnp.float32)


def _pad_rows(x: Float[Array, "M E"]) -> Float[Array, "R E"]:
    """TMA cuts off rows of one group of 8 only."""
    return x if len(x) <= 8 else jnp.pad(x, ((0, -len(x) % 8), (0, 0)))


@functools.partial(jax.jit, static_argnames=("activation", "eps"))
def layer_sm90(
    heads: Float[Array, "M A"],
    residual: Float[Array, "M E"],
    *,
    o: QuantizedMatrix,
    gate_up: QuantizedMatrix,
    down: QuantizedMatrix,
    qkv: QuantizedMatrix | None,
    gains: tuple[Float[Array, " E"], Float[Array, " E"]],
    activation: Callable[[Array], Array],
    eps: float,
) -> tuple[Float[Array, "M E"], Float[Array, "M N"]]:
    """See `quantized_layer_matmuls`."""
    values = {
        "heads": _pad_rows(heads),
        "stream": _pad_rows(residual),
        "mlp_gain": gains[0].reshape(-1, 1),
        "next_gain": gains[1].reshape(-1, 1),
    }
    norm1 = Norm(residual="stream", gain="mlp_gain", normed="normed1", squares="squares1")
    norm2 = Norm(residual="x1", gain="next_gain", normed="normed", squares="squares")
    products = [
        Product("o", "heads", "x1", o, norm=norm1),
        Product("gate_up", "normed1", "inner", gate_up, squares="squares1"),
        Product("down", "inner", "residual", down, norm=norm2),
    ]
    if qkv is not None:
        products.append(Product("qkv", "normed", "y", qkv, squares="squares"))
    results = run_products(products, values, num_rows=len(residual), activation=activation, eps=eps)
    if qkv is not None:
        return results["residual"], results["y"]
    normed, squares = results["normed"].astype(jnp.float32), results["squares"][:, : len(residual)]
    mean_square = jnp.sum(squares, axis=0)[:, None] / normed.shape[1]
    return results["residual"], (normed * jax.lax.rsqrt(mean_square + eps)).astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnames=("activation", "output_dtype"))
def matmul_sm90(
    x: Float[Array, "M K"],
    weight: QuantizedMatrix,
    *,
    bias: Float[Array, "..."] | None,
    activation: Callable[[Array], Array] | None,
    output_dtype: Any,
) -> Float[Array, "M N"]:
    """See `quantized_matmul`."""
    values = {"x": _pad_rows(x)}
    if bias is not None:
        values["bias"] = bias.reshape(-1, 1)
    product = Product("w", "x", "y", weight, bias=None if bias is None else "bias")
    results = run_products(
        [product], values, num_rows=len(x), activation=activation, eps=0.0, output_dtype=output_dtype
    )
    return results["y"]


def why_not_rows(x: Any) -> str | None:
    """Return why the kernel cannot multiply such rows, or None if it can."""
    if num_sms() < NUM_SMS:
        return f"a GPU of {NUM_SMS} multiprocessors, whose thread blocks run at once: {num_sms()}"
    if not 0 < len(x) <= MAX_ROWS:
        return f"1 to {MAX_ROWS} rows, got {len(x)}"
    return None if x.dtype == jnp.bfloat16 else f"rows of bfloat16, got {x.dtype}"


def why_not_matrix(weight: QuantizedMatrix) -> str | None:
    """Return why the kernel cannot multiply by such a weight, or None if it can."""
    if weight.num_outputs % BLOCK_OUTPUTS or weight.depth % 16:
        return f"outputs in multiples of 64 and K of 16, got {weight.num_outputs} and {weight.depth}"
    if weight.scales is not None and weight.scales.shape[-1] not in (1, weight.depth // BLOCK_COLUMNS):
        return f"a scale for each output, or each 128 of K, got {weight.scales.shape[-1]} for {weight.depth}"
    if weight.is_gated and weight.is_packed and weight.scales is not None:
        return "scales behind the codes of packed gate and up"
    return None


def why_not_layer(weights: Sequence[QuantizedMatrix]) -> str | None:
    """Return why one kernel cannot have all of these weights, or None if it can."""
    formats = {(weight.is_packed, weight.scale_rows) for weight in weights}
    if len(formats) > 1:
        return "weights of one code and group size in one kernel"
    return next((reason for reason in map(why_not_matrix, weights) if reason), None)
