"""Meshes of devices with partial sums, and marks for tests of the kernels that exchange them."""

import jax
import pytest
from jax.sharding import AxisType

needs_two_gpus = pytest.mark.skipif(
    jax.default_backend() != "gpu" or jax.device_count() < 2, reason="needs two GPUs that reach each other's memory"
)


def make_mesh(num_devices, others=1):
    devices = jax.devices()[: num_devices * others]
    return jax.make_mesh((others, num_devices), ("other", "tensor"), (AxisType.Explicit,) * 2, devices=devices)
