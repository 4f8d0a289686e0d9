"""Kernels in Pallas's interpreter for GPUs, which prints that it has found a race, and goes on."""

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.deviceless import H200


def interpret(capsys, function, *args, **kwargs):
    """What `function` returns, its kernels interpreted as on an H200; fails if their threads race for memory."""
    capsys.readouterr()
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=H200)
    parameters = plgpu.InterpretGPUParams(detect_races=True)
    with jax.sharding.use_abstract_mesh(mesh), plgpu.force_gpu_interpret_mode(parameters):
        result = jax.block_until_ready(function(*args, **kwargs))
    printed = capsys.readouterr().out
    assert "RACE DETECTED" not in printed, printed
    return result
