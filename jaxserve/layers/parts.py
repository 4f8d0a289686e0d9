"""Which kernels compute parts of a step other than products, which their weights choose, where layers are not fused.

They are data, with the reason why no faster ones do.

What computes a part asks here while a program is traced.
"""

from typing import Any

from jaxserve.layers.context import NO_KERNELS, Kernel, Kernels, Part
from pallas_kernels import (
    add_rms_norm,
    all_gather,
    all_reduce,
    expert_routing,
    recurrent_chunks,
    recurrent_step,
    row_quantization,
)
from pallas_kernels.peers import PeerBuffers
from pallas_kernels.quantized_matmuls import Code


def routing_part(num_tokens: int, routing: expert_routing.Routing, *, kernels: Kernels) -> Part:
    """Return what chooses the experts of a step's tokens and sorts these by expert."""
    reason = NO_KERNELS if kernels == "xla" else expert_routing.why_not(num_tokens, routing)
    return Part(Kernel.EXPERT_ROUTING) if reason is None else Part(Kernel.XLA, reason)


def norm_part(x: Any, code: Code | None, *, kernels: Kernels, has_partial_sums: bool) -> Part:
    """Return what adds an update to a residual stream like `x` and normalises the sum, as `norm.add_rms_norm` does.

    `code` is what the only weight that is multiplied by the norm rounds its rows to, if there is one that does; with
    `has_partial_sums` devices have partial sums of the update, which the kernel adds up.
    """
    if has_partial_sums:
        return Part(Kernel.ALL_REDUCE)
    operation, kernel = (
        (add_rms_norm, Kernel.ADD_RMS_NORM) if code is None else (row_quantization, Kernel.ROW_QUANTIZATION)
    )
    reason = NO_KERNELS if kernels == "xla" else operation.why_not(x.shape[1], x.dtype)
    return Part(kernel) if reason is None else Part(Kernel.XLA, reason)


def update_norm_part(x: Any, code: Code | None, *, kernels: Kernels) -> Part:
    """Return what normalises an update before it is added to a residual stream like `x`: what adds it, if it can.

    `code` is that of the sum's norm, as for `norm_part`; None if the sum has none.
    """
    part = norm_part(x, code, kernels=kernels, has_partial_sums=False)
    return Part(Kernel.XLA, "the next kernel rounds rows") if part.kernel == Kernel.ROW_QUANTIZATION else part


def sum_part(x: Any, peers: PeerBuffers | None) -> Part:
    """Return what adds up the devices' partial sums of rows like `x`."""
    reason = "devices have no buffers for sums" if peers is None else all_reduce.why_not(x, peers)
    return Part(Kernel.ALL_REDUCE) if reason is None else Part(Kernel.XLA, reason)


def gather_part(logits: Any, peers: PeerBuffers | None) -> Part:
    """Return what gathers logits of which each device has some columns, like `logits`."""
    reason = "devices have no buffers for logits" if peers is None else all_gather.why_not(logits, peers)
    return Part(Kernel.ALL_GATHER) if reason is None else Part(Kernel.XLA, reason)


def recurrence_part(
    key_size: int, value_size: int, *, decays_by_channel: bool, kernels: Kernels, is_decode_only: bool
) -> Part:
    """Return what advances the states of heads of these sizes. Rows that verify drafts count as decode steps here."""
    sizes: dict[str, Any] = {"decays_by_channel": decays_by_channel}
    reason = NO_KERNELS if kernels == "xla" else recurrent_step.why_not(key_size, value_size, **sizes)
    if reason is not None:
        return Part(Kernel.XLA, reason)
    if is_decode_only:
        return Part(Kernel.RECURRENT_STEP)
    reason = recurrent_chunks.why_not(key_size, value_size, **sizes)
    return Part(Kernel.RECURRENT_CHUNKS) if reason is None else Part(Kernel.RECURRENCE, reason)
