"""`layer_matmuls` for Hopper (sm_90a), in Mosaic GPU: four matmuls in one kernel that never stops reading weights.

Between kernels a GPU reads nothing for some microseconds: until the slowest thread block has its part, the next kernel
begins and its first weights arrive. Here the weights of the next matmul are on their way while a thread block waits for
the rows of it, which the others are about to finish, as many as its shared memory holds.

Rows, padded to the 64 of one wgmma, are operand A; weights, which lie [outputs, K] as in a checkpoint, are operand B. A
norm between two matmuls is parts of them: the first one writes its rows times the gain and sums of their squares, the
second one divides what it has added up by the root mean square.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.hopper import NUM_SMS, SHARED_MEMORY, num_sms
from pallas_kernels.layer_matmuls.device import ROWS
from pallas_kernels.layer_matmuls.kernel import MAX_ROUNDS, Matmul, Norm, Problem, Shared, kernel

MAX_ROWS = 16
"""With more of them, thread blocks would read more rows from the L2 than weights."""
MAX_X_SLOTS = 16
MAX_WIDTH = 128
"""Weight rows of a step, which has 64 columns or more of them."""
MAX_BLOCK_K = 512
"""Of more, the addresses of a step take more registers than there are; so do those of a loop that is unrolled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How shared memory is used; `heuristic` picks one."""

    slot_bytes: int
    """Weights of a step, in multiples of 1024."""
    w_slots: int
    """Steps in the ring of weights."""
    x_bytes: int
    """Room for rows, in multiples of 1024."""


def heuristic(num_rows: int) -> Config:
    """Room for the rows that are on their way from the L2, and all else for weights: measured, see NOTES.md."""
    x_bytes = (32 if num_rows <= 8 else 48) * 1024
    slot_bytes = 16 * 1024
    return Config(slot_bytes=slot_bytes, w_slots=(SHARED_MEMORY - x_bytes) // slot_bytes, x_bytes=x_bytes)


def check_supported(heads: Any, o: Any, gate_up: Any, down: Any, qkv: Any) -> None:
    """Raises NotImplementedError with the reason if the kernel cannot do it: arrays, or their shapes."""
    if not heads.shape[0]:
        raise NotImplementedError("at least one row")
    if num_sms() < NUM_SMS:
        raise NotImplementedError(f"a GPU of {NUM_SMS} multiprocessors, whose thread blocks run at once: {num_sms()}")
    if heads.shape[0] > MAX_ROWS:
        raise NotImplementedError(f"at most {MAX_ROWS} rows, got {heads.shape[0]}")
    for name, array in (("heads", heads), ("o", o), ("gate_up", gate_up), ("down", down), ("qkv", qkv)):
        if array is None:
            continue
        if array.dtype != jnp.bfloat16:
            # In float16 what stands between two matmuls, times a norm's gain and not yet divided, might overflow.
            raise NotImplementedError(f"bfloat16, got {name} of {array.dtype}")
        if array.shape[-1] % 64 or (name != "heads" and (array.shape[-2] % 8 or array.shape[-2] < 64)):
            raise NotImplementedError(
                f"K in multiples of 64 and outputs in multiples of 8, at least 64, got {name} of shape {array.shape}"
            )
    for name, array, halves in (("o", o, 1), ("gate_up", gate_up, 2), ("down", down, 1), ("qkv", qkv, 1)):
        if array is not None and array.shape[-2] > MAX_ROUNDS * NUM_SMS * 8 * (MAX_WIDTH // (8 * halves)):
            raise NotImplementedError(f"at most {MAX_ROUNDS} rounds of tiles, got {name} of shape {array.shape}")


class _Product(NamedTuple):
    """One of the four, not yet cut; see `Matmul`."""

    name: str
    x: str
    y: str
    weight: Float[Array, "*outputs K"]
    norm: Norm | None = None
    squares: str | None = None


def _cut(product: _Product, rows: int, config: Config) -> Matmul:
    """Tiles that give each SM an equal share of the bytes, in as few rounds as a step of the ring allows."""
    *halves, outputs, depth = product.weight.shape
    num_halves = math.prod(halves)
    rounds = -(-outputs // (NUM_SMS * (MAX_WIDTH // num_halves)))
    width = -(-outputs // (8 * rounds * NUM_SMS)) * 8
    # Views of a slot have all of its bytes, in groups of 8 rows of a multiple of 64 columns; short loops are unrolled.
    limit = min(config.slot_bytes // (2 * width * num_halves), MAX_BLOCK_K, max(depth // 3, 64))
    block_k = max(k for k in range(64, limit + 1, 64) if config.slot_bytes % (16 * k) == 0)
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
        block_k=block_k,
        x_slots=min(config.x_bytes // (rows * block_k * 2), MAX_X_SLOTS),
    )


# Jitted: the layers of a model share one trace and one compilation.
@functools.partial(jax.jit, static_argnames=("activation", "eps", "config", "interpret"))
def layer_matmuls_sm90(
    heads: Float[Array, "M A"],
    residual: Float[Array, "M E"],
    *,
    o: Float[Array, "E A"],
    gate_up: Float[Array, "2 F E"],
    down: Float[Array, "E F"],
    qkv: Float[Array, "N E"] | None,
    gains: tuple[Float[Array, " E"], Float[Array, " E"]],
    activation: Callable[[Array], Array],
    eps: float,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "M E"], Float[Array, "M N"]]:
    """See `layer_matmuls`. Raises NotImplementedError for what the kernel cannot do.

    `interpret` swaps in what the interpreter of `plgpu.force_gpu_interpret_mode` lacks: each matmul is a kernel then.
    """
    check_supported(heads, o, gate_up, down, qkv)
    num_rows = heads.shape[0]
    rows = -(-num_rows // 8) * 8
    config = config or heuristic(num_rows)
    pad = ((0, rows - num_rows if num_rows > 8 else 0), (0, 0))  # TMA cuts off rows of one group of 8 only.
    values = {
        "heads": jnp.pad(heads, pad),
        "stream": jnp.pad(residual, pad),
        "mlp_gain": gains[0].reshape(1, -1),
        "next_gain": gains[1].reshape(1, -1),
        "o": o,
        "gate_up": gate_up,
        "down": down,
        "qkv": qkv,
        "counters": jnp.zeros((2 * MAX_ROUNDS, 32), jnp.int32),
    }
    norm1 = Norm(residual="stream", gain="mlp_gain", normed="normed1", squares="squares1")
    norm2 = Norm(residual="x1", gain="next_gain", normed="normed", squares="squares")
    products = [
        _Product("o", "heads", "x1", o, norm=norm1),
        _Product("gate_up", "normed1", "inner", gate_up, squares="squares1"),
        _Product("down", "inner", "residual", down, norm=norm2),
    ]
    if qkv is not None:
        products.append(_Product("qkv", "normed", "y", qkv, squares="squares"))
    matmuls = [_cut(product, rows, config) for product in products]
    make_problem = functools.partial(
        Problem,
        rows=rows,
        slot_bytes=config.slot_bytes,
        w_slots=config.w_slots,
        activation=activation,
        eps=eps,
        interpret=interpret,
    )
    for part in [[matmul] for matmul in matmuls] if interpret else [matmuls]:
        values |= _run(make_problem(matmuls=tuple(part)), values)
    y = values["y"] if qkv is not None else _divide(values["normed"], values["squares"], eps)
    return values["residual"][:num_rows], y[:num_rows]


def _divide(normed: Float[Array, "R E"], squares: Float[Array, "R P"], eps: float) -> Float[Array, "R E"]:
    """A norm's rows by their root mean square, of which there are squares of parts."""
    mean_square = jnp.sum(squares, axis=1, keepdims=True) / normed.shape[1]
    return (normed.astype(jnp.float32) * jax.lax.rsqrt(mean_square + eps)).astype(normed.dtype)


def _run(problem: Problem, values: dict[str, Any]) -> dict[str, Array]:
    """What the matmuls of a problem write, of what is there before them."""
    num_rows, dtype = values["heads"].shape[0], values["heads"].dtype
    outputs: dict[str, jax.ShapeDtypeStruct] = {}
    inputs: dict[str, Array] = {}
    for matmul in problem.matmuls:
        read = [matmul.x, matmul.name]
        outputs_of = {matmul.y: jax.ShapeDtypeStruct((num_rows, matmul.outputs), dtype)}
        if matmul.squares is not None:
            read.append(matmul.squares)
        if matmul.norm is not None:
            read += [matmul.norm.residual, matmul.norm.gain]
            parts = -(-matmul.num_tiles // 16) * 16
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
        kernel(problem, gmem, Shared(weights, rows, *barriers))

    x_slots = max(matmul.x_slots for matmul in problem.matmuls)
    results = plgpu.kernel(
        body,
        kernel_name="layer_matmuls",
        out_type=tuple(outputs.values()),
        scratch_types=(
            tuple(views) if problem.interpret else plgpu.RefUnion(*views),
            plgpu.Barrier(num_barriers=problem.w_slots, num_arrivals=2),
            plgpu.Barrier(num_barriers=problem.w_slots),
            plgpu.Barrier(num_barriers=x_slots),
            plgpu.Barrier(num_barriers=x_slots),
        ),
        grid=(NUM_SMS,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(*inputs.values())
    return dict(zip(outputs, results, strict=True))


def _views(problem: Problem, dtype: Any) -> tuple[list[Any], dict[tuple[str, str], int]]:
    """Views of the same shared memory, rows and then weights, and which is whose."""
    # Any: pyright takes them for abstract classes.
    transforms = cast(Any, plgpu.TilingTransform)((8, 64)), cast(Any, plgpu.SwizzleTransform)(128)
    x_bytes = max(matmul.x_slots * problem.rows * matmul.block_k * 2 for matmul in problem.matmuls)
    views: list[Any] = []
    where: dict[tuple[str, str], int] = {}
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
