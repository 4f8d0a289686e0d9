"""`expert_routing` for Hopper (sm_90a), in Mosaic GPU: one kernel for what XLA makes a dozen of in a decode step.

A thread block has up to 16 warps, each with a token at a time; where tokens are more, up to 8 blocks of a cluster share
them and tell each other how often they have chosen each expert. There are no atomics: results are the same every time.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.expert_routing.kernel import WARPS, Global, Problem, Shared, kernel
from pallas_kernels.expert_routing.routing import Routed, Routing
from pallas_kernels.expert_routing.thread_ops import COMPILED, INTERPRETED, LANES, THREADS
from pallas_kernels.grouped_matmul import Plan, max_tiles, tile_rows

MAX_TOKENS = 256
"""Of a decode step. A prefill has more, and there XLA's sorts are a small part of the work."""
MAX_EXPERTS = 512
MAX_GROUPS = 4  # warpgroups of a thread block
MAX_PARTS = 8  # thread blocks of a cluster, on every GPU that has clusters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the work is cut; `heuristic` picks one."""

    num_parts: int
    """Thread blocks, a cluster."""
    num_groups: int
    """Warpgroups of each: 128 local experts a warpgroup at most."""


def heuristic(num_tokens: int, num_local_experts: int) -> Config:
    """A warp for each token, as far as there are warps."""
    num_groups = max(-(-num_local_experts // THREADS), min(MAX_GROUPS, -(-num_tokens // WARPS)))
    fewest = -(-num_tokens // (num_groups * WARPS))
    return Config(num_parts=min(MAX_PARTS, 1 << (fewest - 1).bit_length()), num_groups=num_groups)


def why_unsupported(routing: Routing) -> str | None:
    """What the kernel cannot do, for up to MAX_TOKENS tokens; None: it can."""
    if routing.num_experts > MAX_EXPERTS:
        return f"{routing.num_experts} experts are more than the {MAX_EXPERTS} that the kernel routes to"
    if routing.num_experts_per_token > LANES:
        return f"{routing.num_experts_per_token} experts of a token are more than the {LANES} that the kernel chooses"
    if routing.num_groups > LANES:
        return f"{routing.num_groups} groups of experts are more than the {LANES} that the kernel chooses among"
    return None


def expert_routing_sm90(
    logits: Float[Array, "T X"],
    num_tokens: Int[Array, ""],
    *,
    routing: Routing,
    selection_bias: Float[Array, " X"] | None,
    first_expert: int | Int[Array, ""],
    num_local_experts: int,
    config: Config | None = None,
    interpret: bool = False,
) -> Routed:
    """See `expert_routing`. Raises NotImplementedError for what the kernel cannot do.

    `interpret` replaces what the interpreter on a CPU lacks.
    """
    if len(logits) > MAX_TOKENS:
        raise NotImplementedError(f"{len(logits)} tokens are more than the {MAX_TOKENS} that the kernel routes")
    reason = why_unsupported(routing)
    if reason is not None:
        raise NotImplementedError(reason)
    config = config or heuristic(len(logits), num_local_experts)
    num_choices = len(logits) * routing.num_experts_per_token
    rows = tile_rows(num_choices, num_local_experts)
    problem = Problem(
        routing=routing,
        num_tokens=len(logits),
        num_local=num_local_experts,
        tile_rows=rows,
        num_tiles=max_tiles(num_local_experts, num_rows=num_choices, tile_rows=rows),
        num_parts=config.num_parts,
        num_groups=config.num_groups,
        ops=INTERPRETED if interpret else COMPILED,
    )
    return _call(
        logits.reshape(-1),
        selection_bias,
        num_tokens.astype(jnp.int32).reshape(1),
        jnp.asarray(first_expert, jnp.int32).reshape(1),
        problem=problem,
    )


# Jitted: the layers of a model share one trace and one compilation.
@functools.partial(jax.jit, static_argnames="problem")
def _call(
    logits: Float[Array, " TX"],
    selection_bias: Float[Array, " X"] | None,
    num_tokens: Int[Array, " 1"],
    first_expert: Int[Array, " 1"],
    *,
    problem: Problem,
) -> Routed:
    T, k, L = problem.num_tokens, problem.per_token, problem.num_local

    def body(*refs):
        arrays, scratch = list(refs[: -len(scratch_types)]), refs[-len(scratch_types) :]
        if selection_bias is None:
            arrays.insert(1, None)
        kernel(problem, Global(*arrays), Shared(*scratch))

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def shared(*shape: int):
        return plgpu.SMEM(shape, jnp.int32)

    scratch_types: list[Any] = [
        shared(problem.num_groups, WARPS * problem.columns),
        shared(problem.num_groups, problem.tokens_per_warp, THREADS),
        shared(problem.num_parts * problem.columns),
        shared(problem.num_warps),
    ]
    if problem.ops is INTERPRETED:
        scratch_types.append(plgpu.Barrier(num_arrivals=problem.num_groups))
    run = plgpu.kernel(
        body,
        kernel_name="expert_routing",
        out_type=(
            jax.ShapeDtypeStruct((T * k,), jnp.float32),
            *(integers(T * k) for _ in ("experts", "row_of_choice", "token")),
            integers(L),
            *(integers(problem.num_tiles) for _ in ("group", "row", "num_rows")),
            integers(2 * (L + 1)),
        ),
        scratch_types=scratch_types,
        cluster=(problem.num_parts,),
        cluster_names=("part",),
        num_threads=problem.num_groups,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # the kernel has those it needs
        ),
    )
    biases = () if selection_bias is None else (selection_bias,)
    weights, experts, row_of_choice, token, group_sizes, group, row, num_rows, first = run(
        logits, *biases, num_tokens, first_expert
    )
    return Routed(
        weights=weights.reshape(T, k),
        experts=experts.reshape(T, k),
        row=row_of_choice.reshape(T, k),
        token=token,
        group_sizes=group_sizes,
        tiles=Plan(group=group, row=row, num_rows=num_rows, first=first.reshape(2, L + 1)),
    )
