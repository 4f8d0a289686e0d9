"""Everything of jax that it does not promise to keep: private modules that kernels are written with, and the three
functions of it that we change. No other module imports `jax._src`, so a new version of jax is tested here first.
"""

import functools
import hashlib
import threading
from typing import Any

import jax
from jax._src import compiler
from jax._src.lib import mosaic_gpu_dialect
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, gpu, llvm, memref, nvvm, scf, vector
from jax._src.lib.mlir.dialects import math as mlir_math

__all__ = [
    "WRITTEN_FOR",
    "arith",  # and below, parts of MLIR that device code is written in: `jax.extend.mlir` has only some of them
    "ask_ptxas_once",
    "gpu",
    "ir",
    "llvm",
    "load_compiled",
    "memref",
    "mlir_math",
    "mosaic_gpu_extension",
    "name_kernels_by_content",
    "nvvm",
    "scf",
    "vector",
]

WRITTEN_FOR = "0.11.2"
"""Version of jax and jaxlib whose source this module and its users were read against."""

_DUMP_NAME = "mosaic_gpu.dump_basename"
"""The attribute of a kernel's module that names the files of its dumps."""

_only_load = threading.local()
"""`is_set` in threads that load a program and must not compile it."""


def name_kernels_by_content() -> None:
    """Name the kernels that this process lowers from now on by their content, so that programs use one compiled kernel
    for equal ones.

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
    """Start ptxas once in this process to learn its version, which does not change.

    Lowering a kernel, jax starts it for every conversion from or to a type of 8 bits or less, as those of masks are.
    """
    extension = mosaic_gpu_extension()
    if extension is not None and not hasattr(extension._get_ptxas_isa_version, "cache_info"):
        extension._get_ptxas_isa_version = functools.cache(extension._get_ptxas_isa_version)


def mosaic_gpu_extension() -> Any:
    """Return the C++ side of Mosaic GPU, or None without jax's CUDA plugin."""
    try:
        from jax._src.lib import mosaic_gpu
    except ImportError:
        return None
    return mosaic_gpu._mosaic_gpu_ext


class _NotCached(Exception):
    """A program would have to be compiled."""


def load_compiled(lowered: jax.stages.Lowered, options: dict[str, Any]) -> jax.stages.Compiled | None:
    """Load a lowered program from jax's compilation cache. Returns None if it is not there: it is not compiled.

    jax can only load or compile, so the function with which it compiles what it has not found raises meanwhile.
    """
    _compile_unless_loading()
    _only_load.is_set = True
    try:
        return lowered.compile(options)
    except _NotCached:
        return None
    finally:
        _only_load.is_set = False


@functools.cache
def _compile_unless_loading() -> None:
    compile_and_load = compiler.backend_compile_and_load

    def compile_unless_loading(*args: Any, **kwargs: Any) -> Any:
        if getattr(_only_load, "is_set", False):
            raise _NotCached
        return compile_and_load(*args, **kwargs)

    compiler.backend_compile_and_load = compile_unless_loading
