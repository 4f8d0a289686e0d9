"""Memory of the GPUs of one process that their peers write into, and how kernels send through it: see `buffers`."""

from pallas_kernels.peers.buffers import (
    PeerBuffers,
    abstract_peer_buffers,
    allocate_peer_buffers,
    can_reach_each_other,
    peer_buffers_spec,
)

__all__ = ["PeerBuffers", "abstract_peer_buffers", "allocate_peer_buffers", "can_reach_each_other", "peer_buffers_spec"]
