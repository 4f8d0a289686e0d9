"""What the Mosaic kernels are cut for: an H200 or H100 SXM (sm_90a)."""

import jax

NUM_SMS = 132
"""Multiprocessors. With fewer of them the kernels are right too, but some thread blocks wait for others to end; all but
`layer_matmuls`, which needs as many at once, and those that wait for other devices, which have as many as there are."""

SHARED_MEMORY = 232_448 - 1024
"""Bytes that a thread block may have, less some for its barriers."""


def num_sms() -> int:
    """Multiprocessors of the GPU that programs are compiled for: the one that the current mesh is of, or the first one
    of this machine. `NUM_SMS` where there is none, 0 if that is not known.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device.num_cores or 0
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else NUM_SMS
