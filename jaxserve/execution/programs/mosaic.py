"""The Mosaic kernels of lowered programs, to be compiled before the programs are.

XLA and Mosaic both take a process-wide lock on LLVM's options, which are not the same, whenever they compile, and share
it with their own kind only: programs with kernels, compiled side by side, mostly wait for each other. A kernel that has
been compiled is found again by its hash, whichever program it stands in.
"""

import functools
import hashlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.lib import mosaic_gpu_dialect
from jax.extend.mlir import ir
from jax.sharding import Mesh, PartitionSpec

TARGET = "mosaic_gpu_v2"
"""The custom call that is a kernel."""
_TARGET = TARGET.encode()

_DUMP_NAME = "mosaic_gpu.dump_basename"
"""The attribute of a kernel's module that names the files of its dumps."""


class MosaicKernel(NamedTuple):
    """The attributes of a call that decide what is compiled: two calls that have the same share a kernel."""

    kernel_hash: bytes
    module: bytes
    """MLIR bytecode."""
    use_custom_barrier: bool
    skip_device_barrier: bool
    uses_xla_collective_metadata: bool


def name_kernels_by_content() -> None:
    """From now on kernels that this process lowers are named by what they are, so that programs share equal ones.

    jax names each by a number instead, the next one of the process, and the name is hashed with the kernel.
    """
    set_name = mosaic_gpu_dialect.get_or_set_dump_options

    def set_name_by_content(module: Any) -> Any:
        attributes = module.operation.attributes
        if _DUMP_NAME not in attributes:
            digest = hashlib.sha256(str(module).encode()).hexdigest()[:16]
            name = f"{attributes['sym_name'].value}_{digest}"
            attributes[_DUMP_NAME] = ir.StringAttr.get(name, context=module.context)
        return set_name(module)

    mosaic_gpu_dialect.get_or_set_dump_options = set_name_by_content


def ask_ptxas_once() -> None:
    """From now on this process starts ptxas once to learn its version, which does not change.

    Lowering a kernel, jax starts it for every conversion from or to a type of 8 bits or less, as those of masks are.
    """
    try:
        from jax._src.lib import mosaic_gpu
    except ImportError:  # without jax's CUDA plugin it is not asked
        return
    extension: Any = mosaic_gpu._mosaic_gpu_ext
    if not hasattr(extension._get_ptxas_isa_version, "cache_info"):
        extension._get_ptxas_isa_version = functools.cache(extension._get_ptxas_isa_version)


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
