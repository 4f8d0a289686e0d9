"""`layer_matmuls` and `decode_layer` for Hopper (sm_90a), in Mosaic GPU: one kernel that never stops reading weights.

Between kernels a GPU reads nothing for some microseconds: until the slowest CTA has its part, the next kernel begins
and its first weights arrive. Here the weights of the next matmul arrive, as many as shared memory holds, while a CTA
waits for its rows, which the others are about to finish. In `decode_layer`, so do the first weights while it waits for
contexts and attends to them, see attention.py.

Rows, padded to the 64 of one wgmma, are operand A; weights, stored as [outputs, K] as in a checkpoint, are operand B. A
norm between two matmuls is divided between them: the first one writes its rows times the gain and sums of their
squares, the second one divides its sums by the root mean square.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.device.products import Product, Weights, products_of_layer
from pallas_kernels.device.swizzled import tiled
from pallas_kernels.hopper import BY_LANES, NUM_SMS, SHARED_MEMORY, num_sms
from pallas_kernels.layer_matmuls import attention
from pallas_kernels.layer_matmuls.device import ROWS
from pallas_kernels.layer_matmuls.kernel import MAX_ROUNDS, Matmul, Problem, Shared, kernel
from pallas_kernels.paging import Pages
from pallas_kernels.paging.plan import make_plan
from pallas_kernels.paging.tiles import Config as AttentionConfig
from pallas_kernels.paging.tiles import part_rows

ATTENTION_INPUTS = (
    "qkv_rows",
    "cos",
    "sin",
    "write_index",
    "k_pages",
    "v_pages",
    "tables",
    "splits",
    "lens",
    "arrivals",
)
MAX_ROWS = ROWS
MAX_ATTENDING_ROWS = 16
"""Maximum rows of a layer in one kernel. 64 rows were slower than three kernels, see NOTES.md; none in between was
timed.
"""
BLOCK_BYTES = 16 * 1024
"""Keys or values of a step, at most: of a part of a slot that is larger."""
SLOT_BYTES = tuple(kib * 1024 for kib in (28, 24, 32))
"""Slot sizes tried for up to 16 rows: smaller steps are too many to multiply as fast as weights arrive."""
MAX_X_SLOTS = 8
MAX_WIDTH = 128
"""Maximum weight rows of a step, which has 64 columns or more."""
MAX_BLOCK_K = 512
"""Maximum columns of a step. With more, its addresses do not fit into registers; neither do those of an unrolled
loop.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How shared memory is used; `heuristic` picks one for a layer."""

    slot_bytes: int
    """Weights of a step, in multiples of 1024."""
    w_slots: int
    """Steps in the ring of weights."""
    x_bytes: int
    """Bytes for rows, a multiple of 1024."""
    bytes_in_flight: int = 56 * 1024
    """Bytes of weights in flight: with more, all other memory reads wait longer."""
    first_bytes_in_flight: int = 56 * 1024
    """Bytes in flight for a matmul's first steps, as many as the ring holds, while CTAs wait for the matmul before."""
    splits: bool = True
    """True if two CTAs may process a tile together."""


def why_not(heads: Any, weights: Weights) -> str | None:
    """Return why the kernel cannot do it, of arrays or their shapes, or None if it can."""
    if not heads.shape[0]:
        return "at least one row"
    if num_sms() < NUM_SMS:
        return f"a GPU of {NUM_SMS} multiprocessors, whose thread blocks run at once: {num_sms()}"
    if heads.shape[0] > MAX_ROWS:
        return f"at most {MAX_ROWS} rows, got {heads.shape[0]}"
    for name, array in {"heads": heads, **weights._asdict()}.items():
        if array is None:
            continue
        if array.dtype != jnp.bfloat16:
            # In float16, values between two matmuls, multiplied by a gain and not yet divided, might overflow.
            return f"bfloat16, got {name} of {array.dtype}"
        if array.shape[-1] % 64 or (name != "heads" and (array.shape[-2] % 8 or array.shape[-2] < 64)):
            return f"K in multiples of 64 and outputs in multiples of 8, at least 64, got {name} of shape {array.shape}"
    for name, array in weights._asdict().items():
        widest = MAX_WIDTH // (16 if name == "gate_up" else 8)
        if array is not None and array.shape[-2] > MAX_ROUNDS * NUM_SMS * 8 * widest:
            return f"at most {MAX_ROUNDS} rounds of tiles, got {name} of shape {array.shape}"
    return None


def why_not_attention(qkv: Any, pages: Any, half: int) -> str | None:
    """Return why the kernel cannot attend, of arrays or their shapes, or None if it can."""
    num_rows, _, members, head_dim = qkv.shape
    block_size = pages.k.shape[2]
    if num_rows > MAX_ATTENDING_ROWS:
        return f"at most {MAX_ATTENDING_ROWS} rows, got {num_rows}"
    if head_dim not in (64, 128) or half != head_dim // 2:
        return f"whole heads of 64 or 128, got {head_dim} of which {2 * half} are turned"
    if members - 2 > attention.ROWS:
        return f"at most {attention.ROWS} queries a KV head, got {members - 2}"
    if pages.k.dtype != jnp.bfloat16:
        return f"bfloat16, got pages of {pages.k.dtype}"
    if block_size not in (8, 16, 32, 64):
        return f"pages of 8, 16, 32 or 64 tokens, got {block_size}"
    return None


def cut(product: Product, rows: int, config: Config, before: Matmul | None = None) -> Matmul:
    """Divide a matmul into tiles that give each SM an equal number of bytes, in as few rounds as a ring step allows.

    `before` is the matmul that computes the rows, if they are not given. Two CTAs process a tile of twice the width
    together if each would otherwise read more rows from the L2 cache than weights. Raises ValueError if the config has
    no room for two steps of rows or weights: a step is released only when the next one has arrived.
    """
    *halves, outputs, depth = product.weight.shape
    num_halves = math.prod(halves)
    rounds = -(-outputs // (NUM_SMS * (MAX_WIDTH // num_halves)))
    width = -(-outputs // (8 * rounds * NUM_SMS)) * 8
    # Both CTAs must have outputs, and K more than 64 columns: Mosaic drops the coordinate of a dimension of one tile.
    is_shared = config.splits and rows > max(width, 16) and rounds == num_halves == 1
    split = 2 if is_shared and -(-outputs // width) % 2 == 0 and depth > 64 else 1
    # Views of a slot cover all of its bytes, in groups of 8 rows of a multiple of 64 columns; short loops are unrolled.
    limit = min(
        config.slot_bytes // (2 * width * split * num_halves),
        config.x_bytes // (4 * rows),
        MAX_BLOCK_K,
        max(depth // (3 * split), 64),
    )
    if limit < 64 or config.w_slots < 2:
        raise ValueError(f"{config} has no room for two steps of {rows} rows and {num_halves * split * width} outputs")
    block_k = max(k for k in range(64, limit + 1, 64) if config.slot_bytes % (16 * k) == 0)
    step_bytes = 2 * num_halves * width * split * block_k

    def num_steps(num_bytes: int) -> int:
        return min(max(round(num_bytes / step_bytes), 1), config.w_slots)

    return Matmul(
        name=product.name,
        x=product.x,
        y=product.y,
        norm=product.norm,
        squares=product.squares,
        depth=depth,
        outputs=outputs,
        halves=num_halves,
        width=width,
        split=split,
        block_k=block_k,
        x_slots=min(config.x_bytes // (rows * block_k * 2), MAX_X_SLOTS),
        in_flight=num_steps(config.bytes_in_flight),
        first_in_flight=num_steps(config.first_bytes_in_flight),
        # Rows that arrive in several rounds are processed in order.
        begins_apart=split == 1 and (before is None or before.rounds == 1),
    )


def cut_all(products: Sequence[Product], rows: int, config: Config) -> list[Matmul]:
    """Divide the matmuls, each of which computes the rows of the next one."""
    matmuls: list[Matmul] = []
    for product in products:
        matmuls.append(cut(product, rows, config, matmuls[-1] if matmuls else None))
    return matmuls


def heuristic(rows: int, products: Sequence[Product]) -> Config:
    """Return the fastest configuration measured, see NOTES.md: room for the rows in flight from the L2 cache, the rest
    for weights.

    The slot size is the one that holds the most weights: a tile's rows take the space of a multiple of 64 columns. From
    17 rows on, 64 KiB of rows and slots of 16 KiB.
    """
    if rows > 16:
        slot_bytes, x_bytes = 16 * 1024, 64 * 1024
        sums_bytes = ROWS * (ROWS - 8) * 4  # of a tile of two CTAs, which has fewer columns than rows
        w_slots = (SHARED_MEMORY - x_bytes - sums_bytes) // slot_bytes
        return Config(
            slot_bytes=slot_bytes,
            w_slots=w_slots,
            x_bytes=x_bytes,
            bytes_in_flight=64 * 1024,
            first_bytes_in_flight=32 * 1024,
        )
    x_bytes = (28 if rows <= 8 else 56) * 1024

    def bytes_held(config: Config) -> float:
        """On average over the time that weights take."""
        matmuls = cut_all(products, rows, config)
        sizes = [product.weight.size for product in products]
        held = [config.w_slots * 2 * matmul.halves * matmul.tile * matmul.block_k for matmul in matmuls]
        return sum(size * bytes_ for size, bytes_ in zip(sizes, held, strict=True)) / sum(sizes)

    configs = [
        Config(slot_bytes=slot_bytes, w_slots=(SHARED_MEMORY - x_bytes) // slot_bytes, x_bytes=x_bytes)
        for slot_bytes in SLOT_BYTES
    ]
    return max(configs, key=bytes_held)


# Jitted, so that the layers of a model use one trace and one compilation.
@functools.partial(jax.jit, static_argnames=("activation", "eps", "config", "interpret"))
def layer_matmuls_sm90(
    heads: Float[Array, "M A"],
    residual: Float[Array, "M E"],
    weights: Weights,
    gains: tuple[Float[Array, " E"], Float[Array, " E"]],
    *,
    activation: Callable[[Array], Array],
    eps: float,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "M E"], Float[Array, "M N"]]:
    """Run the kernel, see `layer_matmuls`. Raises NotImplementedError for what it does not support.

    `interpret` replaces what the interpreter of `plgpu.force_gpu_interpret_mode` lacks: each matmul is then a kernel.
    """
    if (reason := why_not(heads, weights)) is not None:
        raise NotImplementedError(reason)
    values, options = {"heads": _pad_rows(heads)}, {"config": config, "interpret": interpret}
    return _run_all(None, values, residual, weights, gains, activation=activation, eps=eps, **options)


@functools.partial(jax.jit, static_argnames=("scale", "activation", "eps", "config", "interpret"))
def decode_layer_sm90(
    qkv: Float[Array, "M K members D"],
    pages: Pages,
    residual: Float[Array, "M E"],
    weights: Weights,
    gains: tuple[Float[Array, " E"], Float[Array, " E"]],
    *,
    rotation: tuple[Float[Array, "M half"], Float[Array, "M half"]],
    write_index: Int[Array, " M"],
    block_tables: Int[Array, "M pages"],
    seq_lens: Int[Array, " M"],
    scale: float,
    activation: Callable[[Array], Array],
    eps: float,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "M E"], Float[Array, "M N"], Pages]:
    """See `decode_layer`."""
    _, num_kv_heads, members, head_dim = qkv.shape
    block_bytes = BLOCK_BYTES if config is None else min(config.slot_bytes, BLOCK_BYTES)
    problem = attention.Problem(
        config=AttentionConfig(block_kv=block_bytes // (2 * head_dim), stages=1, streams=1),
        head_dim=head_dim,
        block_size=pages.k.shape[2],
        num_tiles=num_kv_heads,
        tiles_per_head=1,
        tile_rows=members - 2,
        columns=0,
        queries_per_token=members - 2,
        num_queries=1,
        scale=scale,
        sliding_window=None,
        soft_cap=None,
        interpret=interpret,
    )
    splits, lens, arrivals = make_plan(
        seq_lens,
        jnp.ones_like(seq_lens),
        num_tiles=num_kv_heads,
        num_splits=problem.config.num_splits,
        block_kv=problem.config.block_kv,
        sliding_window=None,
    )
    k_ref, v_ref = jax.new_ref(pages.k), jax.new_ref(pages.v)  # changed in place by the kernel
    values = {
        "qkv_rows": qkv,
        "cos": rotation[0],
        "sin": rotation[1],
        "write_index": write_index,
        "k_pages": k_ref,
        "v_pages": v_ref,
        "tables": block_tables,
        "splits": splits,
        "lens": lens,
        "arrivals": arrivals,
    }
    options = {"config": config, "interpret": interpret}
    x, y = _run_all(problem, values, residual, weights, gains, activation=activation, eps=eps, **options)
    return x, y, Pages(jax.freeze(k_ref), jax.freeze(v_ref))


def _pad_rows(x: Float[Array, "M E"]) -> Float[Array, "R E"]:
    """Pad rows to a multiple of 8: TMA can cut off only within one group of 8."""
    return x if len(x) <= 8 else jnp.pad(x, ((0, -len(x) % 8), (0, 0)))


def _run_all(
    of_heads: attention.Problem | None,
    values: dict[str, Any],
    residual: Float[Array, "M E"],
    weights: Weights,
    gains: tuple[Float[Array, " E"], Float[Array, " E"]],
    *,
    activation: Callable[[Array], Array],
    eps: float,
    config: Config | None,
    interpret: bool,
) -> tuple[Array, Array]:
    """Return the residual stream and what follows it, computed from the heads or from what makes them."""
    if residual.dtype != jnp.bfloat16:
        raise NotImplementedError(f"bfloat16, got residual of {residual.dtype}")
    num_rows = len(residual)
    rows = -(-num_rows // 8) * 8
    values = (
        values
        | weights._asdict()
        | {
            "stream": _pad_rows(residual),
            "mlp_gain": gains[0].reshape(1, -1),
            "next_gain": gains[1].reshape(1, -1),
            "counters": jnp.zeros((2 * MAX_ROUNDS + 1, 32), jnp.int32),
        }
    )
    products = products_of_layer(weights)
    config = config or heuristic(rows, products)
    if interpret:  # it has no clusters
        config = dataclasses.replace(config, splits=False)
    matmuls = cut_all(products, rows, config)
    make_problem = functools.partial(
        Problem,
        rows=rows,
        slot_bytes=config.slot_bytes,
        w_slots=config.w_slots,
        activation=activation,
        eps=eps,
        interpret=interpret,
    )
    parts: list[tuple[attention.Problem | None, list[Matmul]]] = [(of_heads, matmuls)]
    if interpret:
        parts = [(None, [matmul]) for matmul in matmuls]
        if of_heads is not None:
            parts.insert(0, (of_heads, []))
    for heads, part in parts:
        values |= _run(make_problem(matmuls=tuple(part), attention=heads), values, len(values["stream"]))
    y = values["y"] if weights.qkv is not None else _divide(values["normed"], values["squares"], eps)
    return values["residual"][:num_rows], y[:num_rows]


def _divide(normed: Float[Array, "R E"], squares: Float[Array, "R P"], eps: float) -> Float[Array, "R E"]:
    """Divide a norm's rows by their root mean square, given partial sums of squares."""
    mean_square = jnp.sum(squares, axis=1, keepdims=True) / normed.shape[1]
    return (normed.astype(jnp.float32) * jax.lax.rsqrt(mean_square + eps)).astype(normed.dtype)


def _run(problem: Problem, values: dict[str, Any], num_rows: int) -> dict[str, Array]:
    """Run the kernel of a problem on the given arrays, and return its outputs."""
    dtype = values["stream"].dtype
    outputs: dict[str, jax.ShapeDtypeStruct] = {}
    inputs: dict[str, Array] = {}
    heads = problem.attention
    if heads is not None:
        inputs |= {name: values[name] for name in ATTENTION_INPUTS}
        num_parts, rows = 2 * heads.config.num_splits, part_rows(heads.tile_rows)
        width = heads.num_tiles * heads.tile_rows * heads.head_dim
        outputs |= {
            "heads": jax.ShapeDtypeStruct((num_rows, width), dtype),
            "parts": jax.ShapeDtypeStruct((num_parts, rows, heads.head_dim), jnp.float32),
            "stats": jax.ShapeDtypeStruct((num_parts, 2, rows), jnp.float32),
        }
    for matmul in problem.matmuls:
        read = [matmul.x, matmul.name]
        outputs_of = {matmul.y: jax.ShapeDtypeStruct((num_rows, matmul.outputs), dtype)}
        if matmul.squares is not None:
            read.append(matmul.squares)
        if matmul.norm is not None:
            read += [matmul.norm.residual, matmul.norm.gain]
            parts = -(-matmul.num_tiles * matmul.split // 16) * 16
            outputs_of[matmul.norm.normed] = outputs_of[matmul.y]
            outputs_of[matmul.norm.squares] = jax.ShapeDtypeStruct((num_rows, parts), jnp.float32)
        inputs |= {name: values[name] for name in read if name not in outputs}
        outputs |= outputs_of
    if len(problem.matmuls) > 1:
        inputs["counters"] = values["counters"]
        outputs["last_counters"] = jax.ShapeDtypeStruct((MAX_ROUNDS, 32), jnp.int32)

    views, where = _views(problem, dtype)
    num_arrays = len(inputs) + len(outputs)

    def body(*refs: Any) -> None:
        arrays, (ring, *barriers) = refs[:num_arrays], refs[num_arrays:]
        weights = {matmul.name: ring[where["weights", matmul.name]][1] for matmul in problem.matmuls}
        rows = {matmul.name: ring[where["rows", matmul.name]] for matmul in problem.matmuls}
        gmem = dict(zip([*inputs, *outputs], arrays, strict=True))
        blocks = ring[where["blocks"]][1] if heads is not None else None
        shared = (*barriers, None, None) if problem.cluster == 1 else barriers
        kernel(problem, gmem, Shared(weights, rows, blocks, *shared))

    x_slots = max([matmul.x_slots for matmul in problem.matmuls], default=1)
    pages_per_block = 1 if heads is None else heads.config.block_kv // heads.block_size
    sums: tuple[Any, ...] = ()
    clusters = {}
    if problem.cluster > 1:
        width = max(matmul.width for matmul in problem.matmuls if matmul.split > 1)
        sums = plgpu.SMEM((ROWS, width), jnp.float32, transforms=tiled(8, itemsize=4)), plgpu.Barrier()
        clusters = {"cluster": (problem.cluster,), "cluster_names": ("rank",)}
    results = plgpu.kernel(
        body,
        kernel_name="layer_matmuls",
        out_type=tuple(outputs.values()),
        scratch_types=(
            tuple(views) if problem.interpret else plgpu.RefUnion(*views),
            plgpu.Barrier(num_barriers=problem.w_slots, num_arrivals=pages_per_block),
            plgpu.Barrier(num_barriers=problem.w_slots, num_arrivals=2),
            plgpu.Barrier(num_barriers=problem.w_slots),
            plgpu.Barrier(num_barriers=x_slots),
            plgpu.Barrier(num_barriers=x_slots),
            *sums,
        ),
        grid=(NUM_SMS // problem.cluster,),
        grid_names=("cta",),
        **clusters,
        num_threads=3,
        thread_name="wg",
        compiler_params=BY_LANES,
    )(*inputs.values())
    return dict(zip(outputs, results, strict=True))


def _views(problem: Problem, dtype: Any) -> tuple[list[Any], dict[Any, int]]:
    """Return views of the same shared memory, rows and then weights, and the index of each."""
    transforms = tiled(64)
    x_bytes = max([matmul.x_slots * problem.rows * matmul.block_k * 2 for matmul in problem.matmuls], default=1024)
    views: list[Any] = []
    where: dict[Any, int] = {}
    heads = problem.attention
    if heads is not None:
        where["blocks"] = len(views)
        blocks = (problem.w_slots, problem.slot_bytes // (2 * heads.head_dim), heads.head_dim)
        views.append((plgpu.SMEM((x_bytes,), jnp.int8), plgpu.SMEM(blocks, dtype, transforms=transforms)))
    for matmul in problem.matmuls:
        weights = (problem.w_slots, problem.slot_bytes // (2 * matmul.block_k), matmul.block_k)
        where["weights", matmul.name] = len(views)
        views.append((plgpu.SMEM((x_bytes,), jnp.int8), plgpu.SMEM(weights, dtype, transforms=transforms)))
        rows = (matmul.x_slots * problem.rows + ROWS - problem.rows,)
        if problem.interpret:
            rows = (matmul.x_slots, ROWS)
        where["rows", matmul.name] = len(views)
        views.append(plgpu.SMEM((*rows, matmul.block_k), dtype, transforms=transforms))
    return views, where
