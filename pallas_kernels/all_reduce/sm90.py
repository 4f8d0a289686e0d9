"""`all_reduce_add_rms_norm` for Hopper GPUs (sm_90a) that reach each other's memory, in Mosaic GPU.

A warpgroup a row: it sends its device's part to all peers, tells each that it is there, waits until theirs are, and
adds them up. Nothing waits for the end of what peers do: a row's places are taken in turns, and a device that has
received its peers' rows of one call knows that they are done with those of the call before.
"""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.add_rms_norm.sm90 import norm, row_layout, supports
from pallas_kernels.all_reduce import device
from pallas_kernels.all_reduce.peers import NUM_TURNS, PeerBuffers


def all_reduce_add_rms_norm_sm90(
    x: Float[Array, "T E"],
    part: Float[Array, "T E"],
    weight: Float[Array, " E"],
    peers: PeerBuffers,
    *,
    eps: float,
) -> tuple[Float[Array, "T E"], Float[Array, "T E"]]:
    """See `all_reduce_add_rms_norm`. Raises NotImplementedError for what `supports` does not."""
    num_rows, size = peers.inbox.shape[-2:]
    if x.shape[0] > num_rows or x.shape[1] != size or not x.dtype == part.dtype == peers.inbox.dtype:
        raise NotImplementedError(
            f"peers have room for {num_rows} rows of {size} values in {peers.inbox.dtype}, got {x.shape[0]} of "
            f"{x.shape[1]} in {x.dtype} and {part.dtype}"
        )
    if not supports(size, x.dtype):
        raise NotImplementedError(f"rows of {size} values in {x.dtype}: see `add_rms_norm`")
    return _kernel(x, part, weight, peers, eps=eps)


@functools.partial(jax.jit, static_argnames="eps")  # so that all layers of a step share one compiled kernel
def _kernel(x: Array, part: Array, weight: Array, peers: PeerBuffers, *, eps: float) -> tuple[Array, Array]:
    run = plgpu.kernel(
        functools.partial(_body, layout=row_layout(x.shape[1]), eps=eps),
        out_type=(jax.ShapeDtypeStruct(x.shape, x.dtype),) * 2,
        grid=(x.shape[0],),
        grid_names=("row",),
        kernel_name="all_reduce_add_rms_norm",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return run(x, part, weight, *jax.tree.leaves(peers))


def _body(x, part, weight, inbox, arrived, calls, ranks, offsets, total, normed, *, layout, eps: float) -> None:
    load = functools.partial(plgpu.load, layout=layout)
    row, rank, num_peers = lax.axis_index("row"), ranks[0], inbox.shape[2]
    call = calls[0, row] + 1
    inbox = inbox.at[0, call & (NUM_TURNS - 1)]
    device.send(inbox.at[rank, row], offsets.at[0, 0], load(part.at[row]), layout=layout)
    device.tell(arrived.at[0, rank, row], offsets.at[0, 1], call)
    value = load(x.at[row])  # on its way while peers send
    for peer in range(num_peers):
        device.wait(arrived.at[0, peer, row], call)
    device.store(calls.at[0, row], call)
    update = functools.reduce(
        operator.add, (load(inbox.at[peer, row]).astype(jnp.float32) for peer in range(num_peers))
    )
    value += update.astype(value.dtype)
    total[row] = value
    normed[row] = norm(value, functools.partial(load, weight), eps=eps)
