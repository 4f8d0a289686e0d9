"""The schemes that a config implies for matrices whose tensors are not there: for their sizes, and for random weights.

Which modules a checkpoint has left as floats is taken from its lists of names. Where tensors are there, these tell.
"""

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from jaxserve.quantization import mxfp4, nvfp4
from jaxserve.quantization.common import regrouped
from jaxserve.quantization.scheme import Scheme

Config = Mapping[str, Any]

HEAD = "lm_head"
NVFP4 = Scheme(codes="e2m1", group_size=nvfp4.GROUP, scale_dtype="float8_e4m3fn", factor_dtype="float32")
MXFP8 = Scheme(codes="fp8", group_size=32, scale_dtype="bfloat16")
_SKIPPED = ("modules_to_not_convert", "llm_int8_skip_modules")
"""Fields that list modules which stay floats, by parts of their names."""


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a config says of matrices, by the names of their modules."""

    method: str
    config: Config
    aliases: Callable[[str], tuple[str, ...]] | None = None
    """All names that a module may have in the lists; None if it has one."""

    def scheme(self, module: str, num_inputs: int) -> Scheme | str | None:
        """Return how the codes of a module's matrix could be held, or why not; None if it is stored as floats."""
        config = self.config.get("quantization", self.config) if self.method == "modelopt" else self.config
        names = (module,) if self.aliases is None else self.aliases(module)
        is_left = any(_is_left(self.method, config, name) for name in names)
        if is_left or (module == HEAD and not _names_head(self.method, config)):
            return None
        schemes = (_READERS[self.method](config, name) for name in names)
        found = next((scheme for scheme in schemes if scheme is not None), None)
        if found is None or found.group_size is None or found.codes == "e2m1":  # whose groups are always the same
            return found
        if found.group_size >= num_inputs:
            return msgspec.structs.replace(found, group_size=None)
        return regrouped(found, num_inputs)


def _is_left(method: str, config: Config, module: str) -> bool:
    """Return true if a list of a config says that a module is stored as floats."""
    skipped = [name for field in _SKIPPED for name in config.get(field) or ()]
    if any(_is_within(module, name) for name in skipped):
        return True
    match method:
        case "modelopt":
            left = (*(config.get("exclude_modules") or ()), *(config.get("ignore") or ()))
            return any(fnmatch.fnmatchcase(module, name) or _is_within(module, name) for name in left)
        case "compressed-tensors":
            return any(_is_target(module, name) for name in config.get("ignore") or ())
        case "gptq":
            first = next((each for each in config.get("dynamic") or {} if re.match(_of_gptq(each), module)), "")
            return first.startswith("-:")
    return False


def _names_head(method: str, config: Config) -> bool:
    """Return true if a config may say that the LM head is quantized: a matrix like others for two of the methods."""
    return method in ("compressed-tensors", "modelopt") or config.get(HEAD) is True


def _is_within(module: str, name: str) -> bool:
    """Return true if a name is one or several whole parts of the name of a module."""
    return f".{name}." in f".{module}."


def _fp8(config: Config, module: str) -> Scheme | None:  # noqa: ARG001 (all are alike)
    block = config.get("weight_block_size")
    return Scheme(codes="fp8", group_size=block[1] if block else None)


def _fbgemm_fp8(config: Config, module: str) -> Scheme | None:  # noqa: ARG001
    return Scheme(codes="fp8")


def _modelopt(config: Config, module: str) -> Scheme | None:
    algorithm = config.get("quant_algo")
    if algorithm == "MIXED_PRECISION":
        algorithm = config["quantized_layers"].get(module, {}).get("quant_algo")
    return _OF_MODELOPT.get(str(algorithm))


_OF_MODELOPT = {"FP8": Scheme(codes="fp8"), "MXFP8": MXFP8, "NVFP4": NVFP4, "W4A16_NVFP4": NVFP4}


def _compressed_tensors(config: Config, module: str) -> Scheme | None:
    for group in config["config_groups"].values():
        if any(_is_target(module, name) for name in group.get("targets") or ("Linear",)):
            return _of_group(group.get("format") or config.get("format"), group["weights"])
    return None


def _is_target(module: str, name: str) -> bool:
    """Return true if an entry of `targets` or `ignore` means a module: a pattern, its class, or its name."""
    if name.startswith("re:"):
        return re.match(name.removeprefix("re:"), module) is not None
    return name in ("Linear", module)


def _of_group(kind: Any, weights: Config) -> Scheme | None:
    size = weights.get("group_size")
    size = size if isinstance(size, int) and size > 0 else None
    block = weights.get("block_structure")
    match kind:
        case "nvfp4-pack-quantized":
            return NVFP4
        case "mxfp4-pack-quantized":
            return mxfp4.SCHEME
        case "mxfp8-quantized":
            return MXFP8
        case "pack-quantized":
            return _integers(weights["num_bits"], is_symmetric=weights.get("symmetric", True), size=size)
    name = "fp8" if weights.get("type") == "float" else "int8"
    return Scheme(codes=name, group_size=block[1] if block else size, scale_dtype="bfloat16")


def _integers(bits: int, *, is_symmetric: bool, size: int | None, scale_dtype: Any = "bfloat16") -> Scheme:
    codes = "int8" if bits == 8 else "int4" if is_symmetric else "uint4"
    return Scheme(codes=codes, group_size=size, scale_dtype=scale_dtype, has_zeros=not is_symmetric)


def _of_gptq(pattern: str) -> str:
    """Return the regular expression of an entry of `dynamic`, without its sign."""
    return pattern.removeprefix("-:").removeprefix("+:")


def _gptq(config: Config, module: str) -> Scheme | None:
    said = dict(config)
    for pattern, override in (config.get("dynamic") or {}).items():
        if re.match(_of_gptq(pattern), module):
            said |= override
            break
    size = said.get("group_size")
    size = size if isinstance(size, int) and size > 0 else None
    return _integers(said["bits"], is_symmetric=said.get("sym", True), size=size, scale_dtype="float16")


def _awq(config: Config, module: str) -> Scheme | None:  # noqa: ARG001
    size = config.get("group_size") or config.get("q_group_size") or 128
    return _integers(4, is_symmetric=False, size=size if size > 0 else None, scale_dtype="float16")


def _bitsandbytes(config: Config, module: str) -> Scheme | None:  # noqa: ARG001
    if config.get("load_in_8bit") or config.get("_load_in_8bit"):
        return Scheme(codes="int8")
    return Scheme(codes=config.get("bnb_4bit_quant_type") or "fp4", group_size=64)


def _mxfp4(config: Config, module: str) -> Scheme | None:  # noqa: ARG001
    return mxfp4.SCHEME if ".experts." in module else None


_READERS = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": _fbgemm_fp8,
    "fp8": _fp8,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}
"""The function that reads the config of each method, whose fields `declared` has checked."""
