"""Run kernels in Pallas's interpreter for GPUs, which only prints that it has found a race, and goes on."""

import operator
from unittest import mock

import jax
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic.interpret.vector_clock import NpVectorClock
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.deviceless import H200


def _call_on_host(*args, callback, **_):
    """Replaces jax's function, which first puts each argument on a device, even a list of indices: in most callbacks
    that takes longer than the callback itself. The arguments are views of memory that lives as long as the call.
    """
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return jax.tree.map(np.asarray, callback(*map(np.array, args)))


_to_int_from_device = shared_memory._to_int


def _to_int(x):
    return x.item() if isinstance(x, np.ndarray) else _to_int_from_device(x)


_deallocate_on_device = gpu_callbacks._deallocate_barrier


def _deallocate_barriers(token, mesh_location, thread, keys, **kwargs):
    """jax's, which slices the keys of a kernel's barriers one by one: out of a device array that takes most of a test's
    time.
    """
    return _deallocate_on_device(token, mesh_location, thread, np.asarray(keys), **kwargs)


def _ordered(clock, other):
    """jax's, for clocks of few threads: each access is compared with all before it, and NumPy's calls take longer."""
    ours, others = clock.clock.tolist(), other.clock.tolist()
    return ours != others and (all(map(operator.le, ours, others)) or all(map(operator.le, others, ours)))


def interpret(capsys, function, *args, **kwargs):
    """Return what `function` returns, its kernels interpreted as on an H200; fail if their threads race for memory."""
    capsys.readouterr()
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=H200)
    parameters = plgpu.InterpretGPUParams(detect_races=True)
    with (
        jax.sharding.use_abstract_mesh(mesh),
        plgpu.force_gpu_interpret_mode(parameters),
        mock.patch.object(callback, "io_callback_impl", _call_on_host),
        mock.patch.object(shared_memory, "_to_int", _to_int),
        mock.patch.object(gpu_callbacks, "_deallocate_barrier", _deallocate_barriers),
        mock.patch.object(NpVectorClock, "ordered", _ordered),
    ):
        result = jax.block_until_ready(function(*args, **kwargs))
    printed = capsys.readouterr().out
    assert "RACE DETECTED" not in printed, printed
    return result
