"""The GPU that the Mosaic kernels are tuned for: an H200 or H100 SXM (sm_90a)."""

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

NUM_SMS = 132
"""Multiprocessors of the GPU.

With fewer of them the kernels are correct too, but some CTAs wait for others to end. Exceptions are `layer_matmuls`,
which needs as many at once, and kernels that wait for other devices, which use the GPU's actual number.
"""

SHARED_MEMORY = 232_448 - 1024
"""Shared memory of a CTA in bytes, less some for its barriers."""

BY_LANES = plgpu.CompilerParams(
    approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Lane
)
"""Parameters of kernels whose code is that of lanes, and in which no reduction crosses warps."""


def balance(num_items: float) -> float:
    """Return the fraction of the multiprocessors' time that is work, if all items take equally long; at most 0.94,
    since less than 6% of imbalance is not worth smaller items.
    """
    return min(0.94, num_items / (-(-num_items // NUM_SMS) * NUM_SMS)) if num_items else 0.94


def num_sms() -> int:
    """Return the multiprocessors of the GPU that programs are compiled for, that of the current mesh or this machine's
    first.

    Returns `NUM_SMS` without a GPU, 0 if the number is not known.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device.num_cores or 0
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else NUM_SMS
