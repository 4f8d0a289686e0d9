"""Kernels in Pallas's interpreter for GPUs, which prints that it has found a race, and goes on."""

from unittest import mock

import jax
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.deviceless import H200

_deallocate_on_device = gpu_callbacks._deallocate_barrier


def _deallocate_barriers(token, mesh_location, thread, keys, **kwargs):
    """jax's, which slices the keys of a kernel's barriers one by one: out of a device array that takes most of a test's
    time.
    """
    return _deallocate_on_device(token, mesh_location, thread, np.asarray(keys), **kwargs)


def interpret(capsys, function, *args, **kwargs):
    """What `function` returns, its kernels interpreted as on an H200; fails if their threads race for memory."""
    capsys.readouterr()
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=H200)
    parameters = plgpu.InterpretGPUParams(detect_races=True)
    with (
        jax.sharding.use_abstract_mesh(mesh),
        plgpu.force_gpu_interpret_mode(parameters),
        mock.patch.object(gpu_callbacks, "_deallocate_barrier", _deallocate_barriers),
    ):
        result = jax.block_until_ready(function(*args, **kwargs))
    printed = capsys.readouterr().out
    assert "RACE DETECTED" not in printed, printed
    return result
