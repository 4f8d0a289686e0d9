"""Which kernels compute the parts of a step where layers are not fused, as data: with the reason why no faster ones do.

What computes a part asks here while a program is traced.
"""

import math
from typing import Any

import jax

from jaxserve.layers.activations import FUSED_ACTIVATIONS, Gate, fuses
from jaxserve.layers.context import NO_KERNELS, Kernel, Kernels, Part
from jaxserve.layers.weight import Weight
from pallas_kernels import (
    add_rms_norm,
    all_gather,
    all_reduce,
    expert_routing,
    gated_linear_unit,
    grouped_codes,
    quantized_matmuls,
    small_matmul,
)
from pallas_kernels.peers import PeerBuffers

KERNELS_OF_CODES = (Kernel.QUANTIZED_MATMUL, Kernel.GROUPED_CODES)
"""Kernels that convert codes of weights, and multiply rows as they are."""


def linear_part(x: Any, weight: Weight, reason: str | None = None, *, kernels: Kernels) -> Part:
    """Return what computes `linear`; `x` is an array or its shape, `reason` is against faster kernels.

    For matrices of 16 bits XLA's kernels are the fastest with many rows, and tried out for each shape.
    """
    num_inputs = len(x.shape) - 1
    if weight.rounds_to(x.shape[0], num_inputs) is not None:
        return Part(Kernel.SCALED_MATMUL, reason)
    if (stored := weight.why_not_plain()) is None or kernels == "xla":
        return Part(Kernel.XLA, reason or stored)
    shard = weight.on_one_device()
    codes = jax.eval_shape(lambda x, shard: shard.aligned(x)[1].quantized_matrix(num_inputs), x, shard)
    if codes is None:
        return Part(Kernel.XLA, reason or stored)
    rows = jax.ShapeDtypeStruct((x.shape[0], codes.depth), x.dtype)
    if quantized_matmuls.why_not(rows, codes) is None:
        return Part(Kernel.QUANTIZED_MATMUL, reason)
    group = jax.eval_shape(lambda codes: jax.tree.map(lambda array: array[None], codes), codes)
    why = grouped_codes.why_not(rows, group)
    return Part(Kernel.GROUPED_CODES, reason) if why is None else Part(Kernel.XLA, reason or f"{stored}: {why}")


def few_rows_part(x: Any, weight: Weight, *, kernels: Kernels, has_bias: bool = False) -> Part:
    """Return what computes `linear_of_few_rows`; `x` is an array or its shape."""
    if kernels == "xla" or has_bias:
        return linear_part(x, weight, NO_KERNELS if kernels == "xla" else "it has a bias", kernels=kernels)
    if weight.why_not_plain() is not None:
        return linear_part(x, weight, kernels=kernels)
    shard = weight.shard
    matrix = jax.ShapeDtypeStruct((math.prod(shard.shape[:-1]), shard.shape[-1]), shard.dtype)
    reason = "devices have parts of its inputs" if shard.shape[-1] != weight.shape[-1] else None
    reason = reason or small_matmul.why_not(x, matrix)
    return Part(Kernel.SMALL_MATMUL) if reason is None else linear_part(x, weight, reason, kernels=kernels)


def gate_up_part(x: Any, weight: Weight, activation: str | Gate, *, kernels: Kernels, has_bias: bool) -> Part:
    """Return what computes the first matmul of a gated feed-forward, and why it does not include the activation."""
    if has_bias:
        return linear_part(x, weight, "it has a bias", kernels=kernels)
    if not isinstance(activation, str) or activation not in FUSED_ACTIVATIONS:
        return linear_part(x, weight, why_not_activation(activation), kernels=kernels)
    part = linear_part(x, weight, kernels=kernels)
    if kernels == "xla":
        return Part(part.kernel, NO_KERNELS)
    if part.kernel in (Kernel.SCALED_MATMUL, *KERNELS_OF_CODES):
        return part
    reason = weight.why_not_plain() or gated_linear_unit.why_not(x, weight.shard)
    return Part(Kernel.GATED_LINEAR_UNIT) if reason is None else Part(part.kernel, reason)


def why_not_activation(activation: str | Gate) -> str:
    """Return why a matmul does not include an activation."""
    return f"no matmul has the activation {activation}"


def routing_part(num_tokens: int, routing: expert_routing.Routing, *, kernels: Kernels) -> Part:
    """Return what chooses the experts of a step's tokens and sorts these by expert."""
    reason = NO_KERNELS if kernels == "xla" else expert_routing.why_not(num_tokens, routing)
    return Part(Kernel.EXPERT_ROUTING) if reason is None else Part(Kernel.XLA, reason)


def experts_part(weight: Weight, activation: str | Gate | None, *, dtype: Any, kernels: Kernels) -> Part:
    """Return what multiplies tokens of `dtype` by the matrices of their experts, and why it does not include the
    activation. The weight is local to a device.
    """
    if kernels == "xla":
        return Part(Kernel.XLA, weight.why_not_plain() or NO_KERNELS)
    kernel = Kernel.GROUPED_MATMUL
    if (stored := weight.why_not_plain()) is not None:
        kernel = Kernel.GROUPED_CODES
        codes = jax.eval_shape(lambda weight: weight.quantized_entries(), weight)
        if codes is None:
            return Part(Kernel.XLA, stored)
        if (reason := grouped_codes.why_not(jax.ShapeDtypeStruct((1, weight.shape[-1]), dtype), codes)) is not None:
            return Part(Kernel.XLA, reason)
    return Part(kernel, None if activation is None or fuses(activation) else why_not_activation(activation))


def norm_part(x: Any, reader: Weight | None, *, kernels: Kernels, has_partial_sums: bool) -> Part:
    """Return what adds an update to a residual stream like `x` and normalises the sum, as `norm.add_rms_norm` does.

    `reader` is the only weight that is multiplied by the norm, if there is one; with `has_partial_sums` devices have
    partial sums of the update, which the kernel adds up.
    """
    if has_partial_sums:
        return Part(Kernel.ALL_REDUCE)
    reason = NO_KERNELS if kernels == "xla" else add_rms_norm.why_not(x.shape[1], x.dtype)
    if reason is not None:
        return Part(Kernel.XLA, reason)
    rounds = reader is not None and reader.rounds_to(x.shape[0], 1) is not None
    return Part(Kernel.ROW_QUANTIZATION if rounds else Kernel.ADD_RMS_NORM)


def update_norm_part(x: Any, reader: Weight | None, *, kernels: Kernels) -> Part:
    """Return what normalises an update before it is added to a residual stream like `x`: what adds it, if it can.

    `reader` is that of the sum's norm, as for `norm_part`; None if the sum has none.
    """
    part = norm_part(x, reader, kernels=kernels, has_partial_sums=False)
    return Part(Kernel.XLA, "the next kernel rounds rows") if part.kernel == Kernel.ROW_QUANTIZATION else part


def sum_part(x: Any, peers: PeerBuffers | None) -> Part:
    """Return what adds up the devices' partial sums of rows like `x`."""
    reason = "devices have no buffers for sums" if peers is None else all_reduce.why_not(x, peers)
    return Part(Kernel.ALL_REDUCE) if reason is None else Part(Kernel.XLA, reason)


def gather_part(logits: Any, peers: PeerBuffers | None) -> Part:
    """Return what gathers logits of which each device has some columns, like `logits`."""
    reason = "devices have no buffers for logits" if peers is None else all_gather.why_not(logits, peers)
    return Part(Kernel.ALL_GATHER) if reason is None else Part(Kernel.XLA, reason)
