"""A kernel's side of an exchange with its peers: where pieces are stored, and when those of the others have arrived.

A device sends a piece to all others, increments their counters, and waits until theirs have arrived. Nothing waits for
peers to finish reading: the buffers of a piece are used in turns, and a device that has received its peers' pieces of
one call knows that they have finished the call before.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import NUM_SMS, num_sms
from pallas_kernels.peers import device
from pallas_kernels.peers.buffers import NUM_TURNS


class Exchange(NamedTuple):
    """The refs of a `PeerBuffers`, in its order, in a kernel."""

    inbox: Any
    arrived: Any
    calls: Any
    ranks: Any
    offsets: Any

    @property
    def num_others(self) -> int:
        """The peers but for the device itself."""
        return self.arrived.shape[1]

    @property
    def rank(self) -> Any:
        """The device's own."""
        return self.ranks[0]

    def rank_of(self, other: int) -> Any:
        """Return the rank of an entry of the inbox: ranks without the device's own."""
        return jnp.where(self.rank > other, other, other + 1)

    def received(self, row: Any, other: Any, call: Any) -> Any:
        """Return the buffer of a row from one of the others."""
        return self.inbox.at[0, call & (NUM_TURNS - 1), other, row]

    def call(self, row: Any, piece: Any) -> Any:
        """Return the number of this call for a piece of a row."""
        return self.calls[0, row, piece] + 1

    def send(self, row: Any, piece: Any, put: Callable[[Any, Any], None]) -> None:
        """Send a piece: `put(target, offset)` stores it in one peer's memory; then all peers are notified."""
        call, counters = self.call(row, piece), []
        for other in range(self.num_others):
            peer = self.rank_of(other)
            own = jnp.where(self.rank > peer, self.rank - 1, self.rank)  # the device among that peer's others
            put(self.received(row, own, call), self.offsets.at[0, 0, peer])
            counters.append((self.arrived.at[0, own, row, piece], self.offsets.at[0, 1, peer]))
        device.notify(counters, call)

    def wait(self, row: Any, piece: Any, call: Any) -> None:
        """Until the others' pieces of this call are there. `call` gives the next number from then on."""
        for other in range(self.num_others):
            device.wait(self.arrived.at[0, other, row, piece], call)
        device.store(self.calls.at[0, row, piece], call)


def num_blocks_for(num_items: int, *, blocks_per_multiprocessor: int) -> int:
    """Return the number of CTAs for the items, all of which run at once, so that none waits for one that has not
    started.
    """
    return min(num_items, (num_sms() or NUM_SMS) * blocks_per_multiprocessor)


def exchange_all(
    num_items: int, *, num_blocks: int, block: Any, send: Callable[[Any], None], receive: Callable[[Any], None]
) -> None:
    """Process the items block, block + num_blocks and so on, sending each before receiving the one before it."""
    send(block)
    if num_items <= num_blocks:
        receive(block)
        return

    def turn(i: Any, _: None) -> None:
        item = block + i * num_blocks
        pl.when(item + num_blocks < num_items)(lambda: send(item + num_blocks))
        receive(item)

    lax.fori_loop(jnp.int32(0), (num_items - block + num_blocks - 1) // num_blocks, turn, None)
