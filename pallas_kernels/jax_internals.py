"""Everything of jax that it does not promise to keep: private modules that kernels are written with, and the two
functions of it that we change. No other module imports `jax._src`, so a new version of jax is tested here first.
"""

import functools
import hashlib
from typing import Any

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
