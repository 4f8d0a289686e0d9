"""The bodies of the routing kernels: the work of a CTA's warpgroups. See sm90.py.

Up to the first barrier each warp processes its own tokens in sequence: it chooses their experts, or reads them, and
counts how often it has had each expert so far. Then each thread handles one expert: it adds the counts of the preceding
warps and the totals of the preceding experts, which gives the first row of the expert. Last, warps store their tokens'
rows.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.expert_routing.routing import Routing
from pallas_kernels.expert_routing.thread_ops import LANES, LAYOUT, THREADS, ThreadOps

WARPS = THREADS // LANES
"""Warps per warpgroup."""

# Mosaic compares the int32 result of `jnp.where(mask, scalar, array)` as unsigned, so the array always comes first.
_LEAST = np.int32(-(2**31))  # of no expert
_MOST = np.int32(2**31 - 1)
_SHIFT = 19
MAX_ROWS, MAX_TILES = 2**_SHIFT - 1, 2 ** (31 - _SHIFT) - 1
"""Both are in one integer."""
_AHEAD = 8
"""Number of tokens whose experts are loaded together, if they are chosen already."""

_int = jnp.int32


class Problem(NamedTuple):
    """Compile-time parameters of the kernel."""

    routing: Routing
    num_tokens: int
    """T, the padding included."""
    num_local: int
    tile_rows: int
    num_tiles: int
    """Entries of the plan."""
    num_parts: int
    """CTAs of the cluster, among which the tokens are divided."""
    num_groups: int
    """Warpgroups of each."""
    is_chosen: bool
    """True if the experts have been chosen already."""
    ops: ThreadOps

    @property
    def per_token(self) -> int:
        """The experts of a token."""
        return self.routing.num_experts_per_token

    @property
    def num_choices(self) -> int:
        """Number of choices of all tokens."""
        return self.num_tokens * self.per_token

    @property
    def columns(self) -> int:
        """Number of slots for local experts: one thread of each CTA per slot."""
        return self.num_groups * THREADS

    @property
    def num_warps(self) -> int:
        """Warps per CTA."""
        return self.num_groups * WARPS

    @property
    def tokens_at_once(self) -> int:
        """Number of tokens that a warp counts in sequence without waiting for memory."""
        return _AHEAD if self.is_chosen else 1

    @property
    def tokens_per_warp(self) -> int:
        """The most that a warp has."""
        step = self.num_parts * self.num_warps * self.tokens_at_once
        return -(-self.num_tokens // step) * self.tokens_at_once


class Chooser(NamedTuple):
    """One-dimensional arrays in global memory: the inputs and results of choosing experts."""

    logits: Any
    bias: Any
    """None if there is no bias."""
    weights: Any
    experts: Any


class Global(NamedTuple):
    """Arrays in global memory, with one axis each; the last seven are written."""

    chooser: Chooser | None
    """None: the tokens have their experts already."""
    experts: Any
    num_tokens: Any
    first_expert: Any
    row_of_choice: Any
    token: Any
    group_sizes: Any
    group: Any
    row: Any
    num_rows: Any
    first: Any


class Shared(NamedTuple):
    """Arrays in shared memory."""

    counts: Any
    """[warpgroups, 4 * columns]: how often each warp has chosen an expert; later, its first row of the expert."""
    choices: Any
    """[warpgroups, 4 * tokens of a warp * k]: a choice's local expert and the warp's count before it; -1: none."""
    totals: Any
    """[parts * columns]: how often each part has chosen an expert."""
    sums: Any
    """[warps]: of rows and tiles."""
    barrier: Any = None
    """The interpreter's."""


class _Thread(NamedTuple):
    """The thread's indices, and the step's numbers, which are loaded before anything else."""

    part: Any
    group: Any
    thread: Any
    """Index within the warpgroup."""
    warp: Any
    lane: Any
    first_expert: Any = None
    num_tokens: Any = None
    """Number of tokens that are not padding."""


def choosing_kernel(problem: Problem, chooser: Chooser) -> None:
    """Choose experts only, in each warpgroup (mesh axis "group") of each CTA (axis "part")."""
    thread = problem.ops.thread()
    at = _Thread(lax.axis_index("part"), lax.axis_index("group"), thread, thread >> 5, thread & (LANES - 1))

    def visit(index, _):
        _choose(problem, chooser, at, index)

    lax.fori_loop(_int(0), _int(problem.tokens_per_warp), visit, None)


def kernel(problem: Problem, gmem: Global, smem: Shared) -> None:
    """Run the whole routing in each warpgroup (mesh axis "group") of each CTA (axis "part")."""
    ops = problem.ops
    group, thread = lax.axis_index("group"), ops.thread()
    at = _Thread(
        part=lax.axis_index("part"),
        group=group,
        thread=thread,
        warp=thread >> 5,
        lane=thread & (LANES - 1),
        first_expert=gmem.first_expert[0],
        num_tokens=gmem.num_tokens[0],
    )
    if problem.num_parts > 1:
        ops.arrive_cluster()  # a CTA must have started before others write into its memory
    ops.clear(smem.counts.at[group])
    ops.sync_warp()

    def visit(index, _):
        indices = [index * problem.tokens_at_once + i for i in range(problem.tokens_at_once)]
        if gmem.chooser is None:
            chosen = [ops.gather(gmem.experts, _choice(problem, at, _token(problem, at, i))) for i in indices]
        else:
            chosen = [_choose(problem, gmem.chooser, at, i) for i in indices]
        for i, experts in zip(indices, chosen, strict=True):
            _count(problem, smem, at, i, experts)

    lax.fori_loop(_int(0), _int(problem.tokens_per_warp // problem.tokens_at_once), visit, None)
    ops.sync_block(smem.barrier)
    num_rows = _assign_rows(problem, gmem, smem, at)
    ops.sync_block(smem.barrier)
    lax.fori_loop(_int(0), _int(problem.tokens_per_warp), lambda index, _: _store(problem, gmem, smem, at, index), None)
    num_threads = problem.num_parts * problem.columns

    def clear(index, _):
        row = index * num_threads + (at.part * problem.num_groups + group) * THREADS + thread
        is_behind = (row >= num_rows) & (row < problem.num_choices)
        ops.scatter(gmem.token, _within(row, problem.num_choices), thread * 0, is_behind)

    lax.fori_loop(_int(0), _int(-(-problem.num_choices // num_threads)), clear, None)


def _choose(problem: Problem, chooser: Chooser, at: _Thread, index) -> Any:
    """Return the experts of a warp's token, one per lane, and store them with their weights."""
    token = _token(problem, at, index)
    start = _within(token, problem.num_tokens) * problem.routing.num_experts
    chosen, weights = _best(problem, chooser, at, start)
    is_choice = (at.lane < problem.per_token) & (token < problem.num_tokens)
    choice = _choice(problem, at, token)
    problem.ops.scatter(chooser.weights, choice, weights, is_choice)
    problem.ops.scatter(chooser.experts, choice, chosen, is_choice)
    return chosen


def _count(problem: Problem, smem: Shared, at: _Thread, index, chosen) -> None:
    """Count how often the warp has had the experts of one of its tokens before."""
    ops = problem.ops
    token = _token(problem, at, index)
    is_choice = (at.lane < problem.per_token) & (token < problem.num_tokens)
    local = chosen - at.first_expert
    is_ours = is_choice & (token < at.num_tokens) & (local >= 0) & (local < problem.num_local)
    local = jnp.where(is_ours, local, 0)
    counts, counter = smem.counts.at[at.group], at.warp * problem.columns + local
    count = ops.gather(counts, counter)
    ops.sync_warp()
    # A token's experts differ, so each lane has a counter for itself.
    ops.scatter(counts, counter, count + 1, is_ours)
    ops.sync_warp()
    value = jnp.where(is_ours, (local << _SHIFT) | count, -1)
    ops.scatter(smem.choices.at[at.group], _own_choice(problem, at, index), value, at.lane < problem.per_token)


def _best(problem: Problem, chooser: Chooser, at: _Thread, start) -> tuple[Any, Any]:
    """Expert and weight of a choice in each of the first k lanes; `start` is where the token's logits begin."""
    ops, routing = problem.ops, problem.routing
    experts = [at.lane + first for first in range(0, routing.num_experts, LANES)]
    indices = [_within(expert, routing.num_experts) for expert in experts]
    logits = [ops.gather(chooser.logits, start + index) for index in indices]
    # If nothing else influences the choice, a softmax has the order of its logits, and its weights, normalized by their
    # sum, are a softmax of the chosen logits.
    is_plain = chooser.bias is None and routing.num_groups == 1
    weighs_chosen = routing.scores == "softmax_of_chosen" or (
        routing.scores == "softmax" and routing.is_normalized and is_plain
    )
    weigh = _weighing(problem, experts, logits, weighs_chosen=weighs_chosen)
    preferences = [weigh(logit) for logit in logits]
    if chooser.bias is not None:
        preferences = [
            value + ops.gather(chooser.bias, index) for value, index in zip(preferences, indices, strict=True)
        ]
    keys = _keys(routing, experts, preferences)
    if routing.num_groups > 1:
        keys = _only_best_groups(problem, at, experts, keys)

    def choose(index, state):
        chosen, *keys = state
        expert = _first(ops, experts, keys, _largest(ops, keys))
        return jnp.where(at.lane == index, expert, chosen), *_without(expert, experts, keys)

    chosen, *_ = lax.fori_loop(_int(0), _int(problem.per_token), choose, (at.lane * 0, *keys))
    is_choice = at.lane < problem.per_token
    logit = ops.gather(chooser.logits, start + chosen)
    if weighs_chosen:
        largest = _value(ops.warp_max(jnp.where(is_choice, _key(logit), _LEAST)))
        weights = jnp.where(is_choice, jnp.exp(logit - largest), 0.0)
    else:
        weights = jnp.where(is_choice, weigh(logit), 0.0)
    if weighs_chosen or routing.is_normalized:
        weights = weights / (ops.warp_sum(weights) + routing.eps)
    return chosen, weights * routing.scale


def _weighing(problem: Problem, experts: list[Any], logits: list[Any], *, weighs_chosen: bool) -> Callable[[Any], Any]:
    """Return the function from a logit to its weight, or to a value with the same order."""
    ops, routing = problem.ops, problem.routing
    if routing.scores == "softmax_of_chosen":
        return lambda logit: logit
    if weighs_chosen:
        return lambda logit: jnp.where(logit != 0, logit, 0.0)  # no -0, which has the same weight
    if routing.scores == "sigmoid":
        return lambda logit: 1.0 / (1.0 + jnp.exp(-logit))
    largest = _value(_largest(ops, _keys(routing, experts, logits)))
    exponentials = [
        jnp.where(expert < routing.num_experts, jnp.exp(logit - largest), 0.0)
        for expert, logit in zip(experts, logits, strict=True)
    ]
    total = ops.warp_sum(functools.reduce(jnp.add, exponentials))
    return lambda logit: jnp.exp(logit - largest) / total


def _only_best_groups(problem: Problem, at: _Thread, experts: list[Any], keys: list[Any]) -> list[Any]:
    """Return the keys, with the key of -inf for experts whose group is not chosen."""
    ops, routing = problem.ops, problem.routing
    size = routing.num_experts // routing.num_groups

    def is_of(group, expert):
        return (expert >= group * size) & (expert < (group + 1) * size)

    def score(group, scores):
        of_group = [jnp.where(is_of(group, expert), key, _LEAST) for expert, key in zip(experts, keys, strict=True)]
        best = _largest(ops, of_group)
        value = _value(best)
        if routing.group_score == "best_two":
            of_group = _without(_first(ops, experts, of_group, best), experts, of_group)
            value = value + _value(_largest(ops, of_group))
        return jnp.where(at.lane == group, _key(value), scores)  # each group has a lane

    def choose(_, state):
        scores, *chosen = state
        group = _first(ops, [at.lane], [scores], _largest(ops, [scores]))
        chosen = [was + is_of(group, expert).astype(jnp.int32) for expert, was in zip(experts, chosen, strict=True)]
        return *_without(group, [at.lane], [scores]), *chosen

    scores = lax.fori_loop(_int(0), _int(routing.num_groups), score, at.lane * 0 + _LEAST)
    none = at.lane * 0
    _, *chosen = lax.fori_loop(_int(0), _int(routing.num_chosen_groups), choose, (scores, *(none for _ in experts)))
    others = _keys(routing, experts, [none.astype(jnp.float32) - jnp.inf for _ in experts])
    return [jnp.where(was > 0, key, other) for was, key, other in zip(chosen, keys, others, strict=True)]


def _assign_rows(problem: Problem, gmem: Global, smem: Shared, at: _Thread) -> Any:
    """Turn each warp's counts into row offsets, and store groups and tiles; return the total number of rows."""
    ops = problem.ops
    own = at.group * THREADS
    expert = own + at.thread

    def of_warp(warp: int):
        return smem.counts.at[warp // WARPS, pl.ds(warp % WARPS * problem.columns + own, THREADS)]

    counts = [plgpu.load(of_warp(warp), layout=LAYOUT) for warp in range(problem.num_warps)]
    size, before = functools.reduce(jnp.add, counts), expert * 0
    if problem.num_parts > 1:
        ops.wait_cluster()
        ops.scatter_to_parts(smem.totals, at.part * problem.columns + expert, size, problem.num_parts)
        ops.arrive_cluster()
        ops.wait_cluster()
        size = expert * 0
        for part in range(problem.num_parts):
            total = plgpu.load(smem.totals.at[pl.ds(part * problem.columns + own, THREADS)], layout=LAYOUT)
            before = before + total * (part < at.part).astype(jnp.int32)
            size = size + total
    num_tiles = _num_tiles(size, problem.tile_rows)
    both = size | (num_tiles << _SHIFT)
    running = ops.running_sum(both)
    warp = at.group * WARPS + at.warp
    ops.scatter(smem.sums, warp, running, at.lane == LANES - 1)
    ops.sync_block(smem.barrier)
    first, end = running - both, expert * 0
    for other in range(problem.num_warps):
        total = smem.sums[other]
        first = first + jnp.where(warp > other, expert * 0 + total, 0)
        end = end + total
    first_row, first_tile = first & (2**_SHIFT - 1), first >> _SHIFT
    row = first_row + before
    for other, count in enumerate(counts):
        of_warp(other)[...] = row
        row = row + count
    _store_plan(problem, gmem, at, expert, size, first_row, first_tile, end >> _SHIFT)
    return end & (2**_SHIFT - 1)


def _num_tiles(size: Any, tile_rows: int) -> Any:
    """Return how many tiles of `tile_rows` rows hold `size` rows, for each expert."""
    return lax.div(size + (tile_rows - 1), jnp.full_like(size, tile_rows))


def _store_plan(problem: Problem, gmem: Global, at: _Thread, expert, size, first_row, first_tile, end_tile) -> None:
    """Store the groups and tiles, in the first CTA: what `grouped_matmul.plan` computes from the sizes."""
    ops, num_local, tile_rows = problem.ops, problem.num_local, problem.tile_rows
    is_local = (expert < num_local) & (at.part == 0)
    index = _within(expert, num_local)
    num_tiles = _num_tiles(size, tile_rows)
    ops.scatter(gmem.group_sizes, index, size, is_local)
    for half, values, ends in ((0, first_row, first_row + size), (1, first_tile, end_tile)):
        start = half * (num_local + 1)
        ops.scatter(gmem.first, start + index, values, is_local)
        ops.scatter(gmem.first, index * 0 + (start + num_local), ends, is_local & (expert == num_local - 1))

    def store_tile(index, _):
        tile, skipped = _within(first_tile + index, problem.num_tiles), index * tile_rows
        is_there = is_local & (index < num_tiles)
        ops.scatter(gmem.group, tile, expert, is_there)
        ops.scatter(gmem.row, tile, first_row + skipped, is_there)
        ops.scatter(gmem.num_rows, tile, jnp.minimum(size - skipped, tile_rows), is_there)

    # An expert has at most one row per token.
    lax.fori_loop(_int(0), _int(-(-problem.num_tokens // tile_rows)), store_tile, None)
    for begin in range(0, problem.num_tiles, problem.columns):
        tile = begin + expert
        is_behind = (tile >= end_tile) & (tile < problem.num_tiles) & (at.part == 0)
        for ref in (gmem.group, gmem.row, gmem.num_rows):
            ops.scatter(ref, _within(tile, problem.num_tiles), expert * 0, is_behind)


def _store(problem: Problem, gmem: Global, smem: Shared, at: _Thread, index) -> None:
    """Store the rows of a warp's token."""
    ops = problem.ops
    token = _token(problem, at, index)
    is_choice = (at.lane < problem.per_token) & (token < problem.num_tokens)
    choice = ops.gather(smem.choices.at[at.group], _own_choice(problem, at, index))
    is_ours = is_choice & (choice >= 0)
    local, count = jnp.where(is_ours, choice >> _SHIFT, 0), choice & (2**_SHIFT - 1)
    row = ops.gather(smem.counts.at[at.group], at.warp * problem.columns + local) + count
    row = jnp.where(is_ours, row, problem.num_choices)
    ops.scatter(gmem.row_of_choice, _choice(problem, at, token), row, is_choice)
    ops.scatter(gmem.token, _within(row, problem.num_choices), token, is_ours)


def _token(problem: Problem, at: _Thread, index) -> Any:
    """Return a token of the warp. Warps have consecutive tokens; the last ones may have fewer or none."""
    warp = (at.part * problem.num_groups + at.group) * WARPS + at.warp
    return warp * problem.tokens_per_warp + index


def _choice(problem: Problem, at: _Thread, token) -> Any:
    """Return the index of a lane's choice among all choices."""
    return _within(token * problem.per_token + at.lane, problem.num_choices)


def _own_choice(problem: Problem, at: _Thread, index) -> Any:
    """Return the index of a lane's choice among those of its warpgroup."""
    return (index * WARPS + at.warp) * problem.per_token + jnp.minimum(at.lane, problem.per_token - 1)


def _within(index, size: int) -> Any:
    return jnp.minimum(index, size - 1)


def _key(value: Any) -> Any:
    """Convert a float to an integer with the total order of `lax.top_k`; never the least integer."""
    bits = lax.bitcast_convert_type(value, jnp.int32)
    return jnp.maximum(bits ^ ((bits >> 31) & _MOST), _LEAST + 1)


def _value(key: Any) -> Any:
    """Convert a key back to its float."""
    return lax.bitcast_convert_type(key ^ ((key >> 31) & _MOST), jnp.float32)


def _keys(routing: Routing, experts: list[Any], values: list[Any]) -> list[Any]:
    """Lanes that have no expert have the least there is."""
    return [
        jnp.where(expert < routing.num_experts, _key(value), _LEAST)
        for expert, value in zip(experts, values, strict=True)
    ]


def _largest(ops: ThreadOps, keys: list[Any]) -> Any:
    return ops.warp_max(functools.reduce(jnp.maximum, keys))


def _first(ops: ThreadOps, names: list[Any], keys: list[Any], wanted: Any) -> Any:
    """Return the smallest name with this key."""
    found = names[0] * 0 + _MOST
    for name, key in zip(reversed(names), reversed(keys), strict=True):
        found = jnp.where(key == wanted, name, found)
    return ops.warp_min(found)


def _without(name: Any, names: list[Any], keys: list[Any]) -> list[Any]:
    return [jnp.where(own != name, key, _LEAST) for own, key in zip(names, keys, strict=True)]
