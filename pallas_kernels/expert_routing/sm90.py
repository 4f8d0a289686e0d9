"""`expert_routing` for Hopper (sm_90a), in Mosaic GPU: one kernel instead of XLA's dozen in a decode step.

A CTA has up to 16 warps, each with one token at a time. For more tokens, up to 8 CTAs of a cluster divide them and
exchange how often they have chosen each expert. There are no atomics, so results are deterministic. The many tokens of
a prefill choose their experts first, in a kernel on all multiprocessors.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.expert_routing.kernel import WARPS, Chooser, Global, Problem, Shared, choosing_kernel, kernel
from pallas_kernels.expert_routing.routing import Routed, Routing
from pallas_kernels.expert_routing.thread_ops import COMPILED, INTERPRETED, LANES, THREADS
from pallas_kernels.grouped_matmul import Plan, max_tiles, tile_rows
from pallas_kernels.hopper import NUM_SMS

MAX_EXPERTS = 512
MAX_GROUPS = 4  # warpgroups per CTA
MAX_PARTS = 8  # CTAs per cluster, supported by every GPU with clusters
MAX_CHOICES = 2**18
"""Maximum choices of all tokens: 8 CTAs have 128 KiB of shared memory for them, and the kernel's integers suffice."""
MANY_TOKENS = 256
"""More of them choose in a kernel of their own."""


_COMPILER_PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    unsafe_no_auto_barriers=True,  # the kernels have those they need
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the work is divided; `heuristic` picks one."""

    num_parts: int
    """CTAs, which form a cluster."""
    num_groups: int
    """Warpgroups of each: 128 local experts a warpgroup at most."""
    num_choosers: int = 0
    """CTAs of the kernel in which tokens choose; 0 if there is none."""


def heuristic(num_tokens: int, num_local_experts: int) -> Config:
    """Return a configuration with a warp per token, as far as there are warps."""
    num_groups = max(-(-num_local_experts // THREADS), min(MAX_GROUPS, -(-num_tokens // WARPS)))
    fewest = -(-num_tokens // (num_groups * WARPS))
    num_choosers = min(2 * NUM_SMS, -(-num_tokens // (MAX_GROUPS * WARPS))) if num_tokens > MANY_TOKENS else 0
    return Config(
        num_parts=min(MAX_PARTS, 1 << (fewest - 1).bit_length()), num_groups=num_groups, num_choosers=num_choosers
    )


def why_not(num_tokens: int, routing: Routing) -> str | None:
    """Return what the kernels do not support, for any number of local experts, or None."""
    num_choices = num_tokens * routing.num_experts_per_token
    if routing.scores == "sparse_mixer":
        return "the kernel has no SparseMixer"
    if routing.num_experts > MAX_EXPERTS:
        return f"{routing.num_experts} experts are more than the {MAX_EXPERTS} that the kernel routes to"
    if routing.num_experts_per_token > LANES:
        return f"{routing.num_experts_per_token} experts of a token are more than the {LANES} that the kernel chooses"
    if routing.num_groups > LANES:
        return f"{routing.num_groups} groups of experts are more than the {LANES} that the kernel chooses among"
    if num_choices > MAX_CHOICES:
        return f"{num_choices} choices of {num_tokens} tokens are more than the {MAX_CHOICES} that the kernel sorts"
    return None


def expert_routing_sm90(
    logits: Float[Array, "T X"],
    num_tokens: Int[Array, ""],
    *,
    routing: Routing,
    selection_bias: Float[Array, " X"] | None,
    first_expert: int | Int[Array, ""],
    num_local_experts: int,
    rows_of_tile: int | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Routed:
    """Run the kernels, see `expert_routing`. Raises NotImplementedError for what they do not support.

    `interpret` replaces what the interpreter on a CPU lacks.
    """
    reason = why_not(len(logits), routing)
    if reason is not None:
        raise NotImplementedError(reason)
    config = config or heuristic(len(logits), num_local_experts)
    num_choices = len(logits) * routing.num_experts_per_token
    rows = rows_of_tile or tile_rows(num_choices, num_local_experts)
    problem = Problem(
        routing=routing,
        num_tokens=len(logits),
        num_local=num_local_experts,
        tile_rows=rows,
        num_tiles=max_tiles(num_local_experts, num_rows=num_choices, tile_rows=rows),
        num_parts=config.num_parts,
        num_groups=config.num_groups,
        is_chosen=config.num_choosers > 0,
        ops=INTERPRETED if interpret else COMPILED,
    )
    scalars = num_tokens.astype(jnp.int32).reshape(1), jnp.asarray(first_expert, jnp.int32).reshape(1)
    choosers = (logits.reshape(-1),) if selection_bias is None else (logits.reshape(-1), selection_bias)
    if problem.is_chosen:
        choosing = problem._replace(
            num_parts=config.num_choosers, num_groups=MAX_GROUPS, is_chosen=False, num_local=0, tile_rows=0, num_tiles=0
        )
        weights, experts = _choose(choosers, problem=choosing)
        assigned = _assign_rows((experts,), *scalars, problem=problem)
    else:
        weights, experts, *assigned = _assign_rows(choosers, *scalars, problem=problem)
    row_of_choice, token, group_sizes, group, row, num_rows, first = assigned
    shape = len(logits), routing.num_experts_per_token
    return Routed(
        weights=weights.reshape(shape),
        experts=experts.reshape(shape),
        row=row_of_choice.reshape(shape),
        token=token,
        group_sizes=group_sizes,
        tiles=Plan(group=group, row=row, num_rows=num_rows, first=first.reshape(2, num_local_experts + 1)),
    )


@functools.partial(jax.jit, static_argnames="problem")
def _choose(choosers: tuple[Array, ...], *, problem: Problem) -> tuple[Float[Array, " M"], Int[Array, " M"]]:
    """Weights and experts of all tokens, chosen by logits and the bias that there may be."""

    def body(*refs):
        logits, *bias, weights, experts = refs
        choosing_kernel(problem, Chooser(logits, bias[0] if bias else None, weights, experts))

    run = plgpu.kernel(
        body,
        kernel_name="choose_experts",
        out_type=tuple(jax.ShapeDtypeStruct((problem.num_choices,), dtype) for dtype in (jnp.float32, jnp.int32)),
        grid=(problem.num_parts,),
        grid_names=("part",),
        num_threads=problem.num_groups,
        thread_name="group",
        compiler_params=_COMPILER_PARAMS,
    )
    return run(*choosers)


# Jitted, so that the layers of a model use one trace and one compilation.
@functools.partial(jax.jit, static_argnames="problem")
def _assign_rows(
    choosers: tuple[Array, ...], num_tokens: Int[Array, " 1"], first_expert: Int[Array, " 1"], *, problem: Problem
) -> tuple[Array, ...]:
    """Compute rows and tiles from the experts of all tokens, or from the logits; then weights and experts are returned
    first.
    """
    T, k, L = problem.num_tokens, problem.per_token, problem.num_local

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def shared(*shape: int):
        return plgpu.SMEM(shape, jnp.int32)

    chosen = () if problem.is_chosen else (jax.ShapeDtypeStruct((T * k,), jnp.float32), integers(T * k))

    def body(*refs):
        inputs, refs = refs[: len(choosers)], refs[len(choosers) :]
        (num_tokens, first_expert), refs = refs[:2], refs[2:]
        outputs, scratch = refs[: -len(scratch_types)], refs[-len(scratch_types) :]
        if problem.is_chosen:
            chooser, [experts] = None, inputs
        else:
            (weights, experts), outputs = outputs[:2], outputs[2:]
            chooser = Chooser(inputs[0], inputs[1] if len(inputs) > 1 else None, weights, experts)
        kernel(problem, Global(chooser, experts, num_tokens, first_expert, *outputs), Shared(*scratch))

    scratch_types: list[Any] = [
        shared(problem.num_groups, WARPS * problem.columns),
        shared(problem.num_groups, WARPS * problem.tokens_per_warp * k),
        shared(problem.num_parts * problem.columns),
        shared(problem.num_warps),
    ]
    if problem.ops is INTERPRETED:
        scratch_types.append(plgpu.Barrier(num_arrivals=problem.num_groups))
    run = plgpu.kernel(
        body,
        kernel_name="expert_routing",
        out_type=(
            *chosen,
            *(integers(T * k) for _ in ("row_of_choice", "token")),
            integers(L),
            *(integers(problem.num_tiles) for _ in ("group", "row", "num_rows")),
            integers(2 * (L + 1)),
        ),
        scratch_types=scratch_types,
        cluster=(problem.num_parts,),
        cluster_names=("part",),
        num_threads=problem.num_groups,
        thread_name="group",
        compiler_params=_COMPILER_PARAMS,
    )
    return run(*choosers, num_tokens, first_expert)
