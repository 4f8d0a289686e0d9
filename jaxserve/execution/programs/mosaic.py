"""Find the Mosaic kernels of lowered programs, so that they are compiled before the programs.

XLA and Mosaic both take a process-wide lock on LLVM's options, which differ between them, whenever they compile, and
hold it together only with compilations of their own kind: programs with kernels that are compiled in parallel mostly
wait for each other. A kernel that has been compiled is found again by its hash, whichever program contains it.
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
    """The attributes of a call that decide what is compiled: calls with equal attributes use one compiled kernel."""

    kernel_hash: bytes
    module: bytes
    """MLIR bytecode."""
    use_custom_barrier: bool
    skip_device_barrier: bool
    uses_xla_collective_metadata: bool


def kernels_of(lowered: jax.stages.Lowered) -> set[MosaicKernel]:
    """Return the kernels that a program calls."""
    return {MosaicKernel(*(_value(config[name]) for name in MosaicKernel._fields)) for config in _configs(lowered)}


def compile_kernel(kernel: MosaicKernel, mesh: Mesh) -> None:
    """Compile a kernel for the devices of a mesh, by a program that does nothing but call it, and is never run."""

    def call() -> jax.Array:
        result = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.ffi.ffi_call(TARGET, result, has_side_effect=True)(**kernel._asdict())

    # Each of several devices has a call of its own: XLA would not replicate a call that may have side effects.
    on_each = jax.shard_map(call, mesh=mesh, in_specs=(), out_specs=PartitionSpec(), check_vma=False)
    jax.jit(on_each).lower().compile()


def _configs(lowered: jax.stages.Lowered) -> list[ir.DictAttr]:
    """Return the attributes of every kernel call."""
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
