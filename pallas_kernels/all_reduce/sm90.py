"""Sums over Hopper GPUs (sm_90a) that access each other's memory, in Mosaic GPU.

A warpgroup sends its device's part of a row to all peers, and adds up what they send. See `peers.exchange`.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.device.rows import THREADS, RowParts, row_layout, why_not_row_in_parts
from pallas_kernels.peers import PeerBuffers, device
from pallas_kernels.peers.exchange import Exchange, exchange_all, num_blocks_for

BLOCKS_PER_MULTIPROCESSOR = {32 * THREADS: 6, 64 * THREADS: 4, 128 * THREADS: 2}
"""Maximum row length, for two devices -> CTAs per multiprocessor whose registers fit."""

BLOCKS_OF_MANY_PEERS = 2
"""A multiprocessor's, where a row is the sum of more than two: their addresses take most registers."""


def why_not(x: Float[Array | jax.ShapeDtypeStruct, "T E"], peers: PeerBuffers | None) -> str | None:
    """Return why "sm90" does not take such rows, arrays or their shapes, with these buffers; None if it does."""
    if peers is not None:
        *_, num_rows, size = peers.inbox.shape
        if x.shape[0] > num_rows or x.shape[1] != size or x.dtype != peers.inbox.dtype:
            return (
                f"peers have room for {num_rows} rows of {size} values in {peers.inbox.dtype}, got {x.shape[0]} of "
                f"{x.shape[1]} in {x.dtype}"
            )
    return why_not_row_in_parts(x.shape[1], x.dtype)


def all_reduce_add_rms_norm_sm90(
    x: Float[Array, "T E"], part: Float[Array, "T E"], weight: Float[Array, " E"], peers: PeerBuffers, *, eps: float
) -> tuple[Float[Array, "T E"], Float[Array, "T E"]]:
    """See `all_reduce_add_rms_norm`. Raises NotImplementedError with the reason of `why_not`."""
    if (reason := why_not(x, peers) or why_not(part, peers)) is not None:
        raise NotImplementedError(reason)
    return _sum_with_norm(x, part, weight, peers, eps=eps)


def all_reduce_sm90(part: Float[Array, "T E"], peers: PeerBuffers) -> Float[Array, "T E"]:
    """See `all_reduce`. Raises NotImplementedError with the reason of `why_not`."""
    if (reason := why_not(part, peers)) is not None:
        raise NotImplementedError(reason)
    return _sum(part, peers)


# Jitted, so that all layers of a step use one compiled kernel.
@functools.partial(jax.jit, static_argnames="eps")
def _sum_with_norm(x: Array, part: Array, weight: Array, peers: PeerBuffers, *, eps: float) -> tuple[Array, Array]:
    run = _kernel("all_reduce_add_rms_norm", functools.partial(_body_with_norm, eps=eps), part, peers, num_results=2)
    return run(part, x, weight, *jax.tree.leaves(peers))


@jax.jit
def _sum(part: Array, peers: PeerBuffers) -> Array:
    [total] = _kernel("all_reduce", _body, part, peers, num_results=1)(part, *jax.tree.leaves(peers))
    return total


def _kernel(
    name: str, body: Callable[..., None], part: Array, peers: PeerBuffers, *, num_results: int
) -> Callable[..., Any]:
    num_rows, size = part.shape
    fits = next(blocks for longest, blocks in BLOCKS_PER_MULTIPROCESSOR.items() if size <= longest)
    num_blocks = num_blocks_for(
        num_rows, blocks_per_multiprocessor=fits if peers.num_peers == 2 else BLOCKS_OF_MANY_PEERS
    )
    return plgpu.kernel(
        functools.partial(body, parts=RowParts(size), num_blocks=num_blocks),
        out_type=(jax.ShapeDtypeStruct(part.shape, part.dtype),) * num_results,
        grid=(num_blocks,),
        grid_names=("block",),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )


def _body_with_norm(part, x, weight, *refs, parts: RowParts, num_blocks: int, eps: float) -> None:
    *peers, total, normed = refs

    def finish(row, add_up: Callable[[], list[Any]]) -> None:
        values = parts.load(x.at[row])  # on its way while peers send
        values = [value + added.astype(value.dtype) for value, added in zip(values, add_up(), strict=True)]
        parts.store(total.at[row], values)
        parts.store(normed.at[row], parts.norm(values, functools.partial(parts.load, weight), eps=eps))

    _add_up_rows(part, Exchange(*peers), finish, parts=parts, num_blocks=num_blocks)


def _body(part, *refs, parts: RowParts, num_blocks: int) -> None:
    *peers, total = refs

    def finish(row, add_up: Callable[[], list[Any]]) -> None:
        parts.store(total.at[row], [added.astype(total.dtype) for added in add_up()])

    _add_up_rows(part, Exchange(*peers), finish, parts=parts, num_blocks=num_blocks)


def _add_up_rows(part, exchange: Exchange, finish: Callable[..., None], *, parts: RowParts, num_blocks: int) -> None:
    """Call `finish(row, add_up)` for each row of this CTA; `add_up` waits for what peers send of it."""

    def send(row) -> None:
        own = parts.load(part.at[row])

        def put(target, offset) -> None:
            for to, values in zip(parts.of(target), own, strict=True):
                device.send(to, offset, values, layout=row_layout(len(values)))

        exchange.send(row, 0, put)

    def add_up(row) -> list[Any]:
        call = exchange.call(row, 0)
        exchange.wait(row, 0, call)

        def of(peer: int) -> list[Any]:
            if exchange.num_others == 1 and peer == 1:  # two summands commute, so their order does not matter
                return parts.load(exchange.received(row, 0, call))
            if exchange.num_others == 1:
                return parts.load(part.at[row])
            other = jnp.minimum(jnp.where(exchange.rank < peer, peer - 1, peer), exchange.num_others - 1)
            return lax.cond(
                exchange.rank == peer,
                lambda: parts.load(part.at[row]),
                lambda: parts.load(exchange.received(row, other, call)),
            )

        summands = zip(*(of(peer) for peer in range(exchange.num_others + 1)), strict=True)  # in the same order on all
        return [functools.reduce(operator.add, (value.astype(jnp.float32) for value in each)) for each in summands]

    exchange_all(
        part.shape[0],
        num_blocks=num_blocks,
        block=lax.axis_index("block"),
        send=send,
        receive=lambda row: finish(row, functools.partial(add_up, row)),
    )
