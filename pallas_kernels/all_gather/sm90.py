"""`all_gather` for Hopper GPUs (sm_90a) that access each other's memory, in Mosaic GPU: one warpgroup per piece of a
row.

It sends its device's piece to all peers, writes it to the result, and then what they send. See `peers.exchange`.
"""

import functools
import math

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Shaped

from pallas_kernels.peers import PeerBuffers, device
from pallas_kernels.peers.exchange import Exchange, exchange_all, num_blocks_for

BLOCKS_PER_MULTIPROCESSOR = 4


def num_pieces(size: int, dtype: jax.typing.DTypeLike) -> int:
    """Return the number of pieces in which a row of `size` values is sent."""
    return math.ceil(size * jax.numpy.dtype(dtype).itemsize / device.PIECE)


def why_not(part: Shaped[Array | jax.ShapeDtypeStruct, "T C"], peers: PeerBuffers) -> str | None:
    """Return why the kernel does not take such columns, arrays or their shapes, with these buffers; None if it does."""
    *_, num_rows, size = peers.inbox.shape
    fits = part.shape[0] <= num_rows and part.shape[1] == size and part.dtype == peers.inbox.dtype
    is_cut = peers.calls.shape[-1] == num_pieces(size, part.dtype)
    if fits and is_cut and size * part.dtype.itemsize % device.UNIT == 0:
        return None
    return (
        f"peers have room for {num_rows} rows of {size} values in {peers.inbox.dtype}, in {peers.calls.shape[-1]} "
        f"pieces, got {part.shape[0]} of {part.shape[1]} in {part.dtype}; rows are of a multiple of {device.UNIT} "
        "bytes"
    )


def all_gather_sm90(part: Shaped[Array, "T C"], peers: PeerBuffers) -> Shaped[Array, "T columns"]:
    """See `all_gather`. Raises NotImplementedError with the reason of `why_not`."""
    if (reason := why_not(part, peers)) is not None:
        raise NotImplementedError(reason)
    return _kernel(part, peers)


@jax.jit
def _kernel(part: Array, peers: PeerBuffers) -> Array:
    num_rows, size = part.shape
    pieces = num_pieces(size, part.dtype)
    num_blocks = num_blocks_for(num_rows * pieces, blocks_per_multiprocessor=BLOCKS_PER_MULTIPROCESSOR)
    run = plgpu.kernel(
        functools.partial(_body, pieces=pieces, num_blocks=num_blocks),
        out_type=jax.ShapeDtypeStruct((num_rows, peers.num_peers, size), part.dtype),
        grid=(num_blocks,),
        grid_names=("block",),
        kernel_name="all_gather",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return run(part, *jax.tree.leaves(peers)).reshape(num_rows, -1)


def _body(part, *refs, pieces: int, num_blocks: int) -> None:
    *peers, gathered = refs
    exchange = Exchange(*peers)

    def send(item) -> None:
        row, piece = item // pieces, item % pieces
        own = part.at[row]
        exchange.send(row, piece, lambda target, offset: device.copy_to_peer(own, target, offset, piece))

    def receive(item) -> None:
        row, piece = item // pieces, item % pieces
        call = exchange.call(row, piece)
        device.copy(part.at[row], gathered.at[row, exchange.rank], piece)
        exchange.wait(row, piece, call)
        for other in range(exchange.num_others):
            received = exchange.received(row, other, call)
            device.copy(received, gathered.at[row, exchange.rank_of(other)], piece)

    exchange_all(
        part.shape[0] * pieces, num_blocks=num_blocks, block=lax.axis_index("block"), send=send, receive=receive
    )
