"""Adding up what devices have made of a sum, and what a layer does with it next, in one kernel."""

from pallas_kernels.all_reduce.op import Implementation, all_reduce_add_rms_norm, supports
from pallas_kernels.all_reduce.peers import (
    PeerBuffers,
    abstract_peer_buffers,
    allocate_peer_buffers,
    can_reach_each_other,
    peer_buffers_spec,
)

__all__ = [
    "Implementation",
    "PeerBuffers",
    "abstract_peer_buffers",
    "all_reduce_add_rms_norm",
    "allocate_peer_buffers",
    "can_reach_each_other",
    "peer_buffers_spec",
    "supports",
]
