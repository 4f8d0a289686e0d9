"""The Mosaic kernels of lowered programs, to be compiled before the programs are, and once for all of them.

XLA and Mosaic both take a process-wide lock on LLVM's options, which are not the same, whenever they compile: programs
with kernels, compiled side by side, mostly wait for each other. A kernel that has been compiled is found again by its
hash, whichever program it stands in.
"""

import hashlib
import io
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.interpreters.mlir import make_ir_context
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TARGET = "mosaic_gpu_v2"
"""The custom call that is a kernel."""

CONFIG = "mhlo.backend_config"

BASENAME = "mosaic_gpu.dump_basename"
"""The attribute of a kernel that names files for people: jax numbers the kernels that a process has lowered."""


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
    return {MosaicKernel(*(_value(config[name]) for name in MosaicKernel._fields)) for _, config in _calls(lowered)}


def share_kernels(lowered: jax.stages.Lowered) -> jax.stages.Lowered:
    """Give kernels that are equal one name and hash, in whichever order processes have lowered them. Changed in place.

    So programs that are compiled are found on disk again, too.
    """
    renamed: dict[bytes, tuple[bytes, bytes]] = {}
    for call, config in _calls(lowered):
        kernel_hash = config["kernel_hash"].value_bytes
        if kernel_hash not in renamed:
            renamed[kernel_hash] = _renamed(config["module"].value_bytes)
        kernel_hash, module = renamed[kernel_hash]
        with call.context:
            config |= {"kernel_hash": ir.StringAttr.get(kernel_hash), "module": ir.StringAttr.get(module)}
            call.attributes[CONFIG] = ir.DictAttr.get(config)
    return lowered


def compile_kernel(kernel: MosaicKernel, mesh: Mesh) -> None:
    """Compile a kernel for the devices of a mesh, by a program that does nothing but call it, and is never run."""

    def call() -> jax.Array:
        result = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.ffi.ffi_call(TARGET, result, has_side_effect=True)(**kernel._asdict())

    with jax.set_mesh(mesh):
        jax.jit(call, out_shardings=NamedSharding(mesh, PartitionSpec())).lower().compile()


def _calls(lowered: jax.stages.Lowered) -> Iterator[tuple[ir.Operation, dict[str, Any]]]:
    """The calls of kernels, and their attributes."""
    calls: list[ir.Operation] = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if (
            operation.name == "stablehlo.custom_call"
            and _value(operation.attributes["call_target_name"]) == TARGET.encode()
        ):
            calls.append(operation)
        return ir.WalkResult.ADVANCE

    module: Any = lowered.compiler_ir("stablehlo")
    module.operation.walk(visit)
    for call in calls:
        yield call, {attribute.name: attribute.attr for attribute in ir.DictAttr(call.attributes[CONFIG])}


def _renamed(module: bytes) -> tuple[bytes, bytes]:
    """Hash and bytecode of a kernel that is named after what it is."""
    context = make_ir_context()
    context.allow_unregistered_dialects = True
    with context:
        parsed = ir.Module.parse(module)
        name = _value(parsed.operation.attributes[BASENAME]).decode().rpartition("_")[0]
        parsed.operation.attributes[BASENAME] = ir.StringAttr.get(name)
        parsed.operation.attributes[BASENAME] = ir.StringAttr.get(f"{name}_{_hash(parsed).hex()[:8]}")
        return _hash(parsed), _bytecode(parsed)


def _hash(module: ir.Module) -> bytes:
    return hashlib.sha256(_bytecode(module)).digest()


def _bytecode(module: ir.Module) -> bytes:
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer, desired_version=0)
    return buffer.getvalue()


def _value(attribute: ir.Attribute) -> Any:
    return attribute.value_bytes if isinstance(attribute, ir.StringAttr) else ir.BoolAttr(attribute).value
