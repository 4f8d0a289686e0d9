"""The Mosaic kernels of lowered programs, to be compiled before the programs are.

XLA and Mosaic both take a process-wide lock on LLVM's options, which are not the same, whenever they compile, and share
it with their own kind only: programs with kernels, compiled side by side, mostly wait for each other. A kernel that has
been compiled is found again by its hash, whichever program it stands in.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.sharding import Mesh, PartitionSpec

TARGET = "mosaic_gpu_v2"
"""The custom call that is a kernel."""
_TARGET = TARGET.encode()


class MosaicKernel(NamedTuple):
    """The attributes of a call that decide what is compiled: two calls that have the same share a kernel."""

    kernel_hash: bytes
    module: bytes
    """MLIR bytecode."""
    use_custom_barrier: bool
    skip_device_barrier: bool
    uses_xla_collective_metadata: bool


def kernels_of(lowered: jax.stages.Lowered) -> set[MosaicKernel]:
    """The kernels that a program calls."""
    return {MosaicKernel(*(_value(config[name]) for name in MosaicKernel._fields)) for config in _configs(lowered)}


def compile_kernel(kernel: MosaicKernel, mesh: Mesh) -> None:
    """Compile a kernel for the devices of a mesh, by a program that does nothing but call it, and is never run."""

    def call() -> jax.Array:
        result = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.ffi.ffi_call(TARGET, result, has_side_effect=True)(**kernel._asdict())

    # Of several devices each has a call of its own: XLA would not repeat one that may have an effect.
    on_each = jax.shard_map(call, mesh=mesh, in_specs=(), out_specs=PartitionSpec(), check_vma=False)
    jax.jit(on_each).lower().compile()


def _configs(lowered: jax.stages.Lowered) -> list[ir.DictAttr]:
    """The attributes of every call of a kernel."""
    configs: list[ir.DictAttr] = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if operation.name == "stablehlo.custom_call" and _value(operation.attributes["call_target_name"]) == _TARGET:
            configs.append(ir.DictAttr(operation.attributes["mhlo.backend_config"]))
        return ir.WalkResult.ADVANCE

    module: Any = lowered.compiler_ir("stablehlo")
    module.operation.walk(visit)
    return configs


def _value(attribute: ir.Attribute) -> Any:
    return attribute.value_bytes if isinstance(attribute, ir.StringAttr) else ir.BoolAttr(attribute).value
