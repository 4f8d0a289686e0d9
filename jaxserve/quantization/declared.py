"""Turn what a checkpoint declares about its quantization into the formats that its matrices are read by.

What is not supported is refused here by name, from the config alone: before a download.
"""

import re
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.quantization import bitsandbytes, nvfp4
from jaxserve.quantization.awq import AWQ
from jaxserve.quantization.gptq import GPTQ, Override
from jaxserve.quantization.mxfp4 import MXFP4
from jaxserve.quantization.packed import Packed
from jaxserve.quantization.plain import Plain
from jaxserve.quantization.stored import Format

Config = Mapping[str, Any]


def formats_of(method: Any, config: Config, where: str) -> tuple[Format, ...]:
    """Return the formats that matrices of a checkpoint may have.

    `config` is the object that describes the `method`; `where` names it in errors. Raises CheckpointError, naming what
    is not supported.
    """
    if not isinstance(method, str) or method not in _READERS:
        raise CheckpointError(
            f"quantized checkpoints are not supported, other than {', '.join(_READERS)} and gpt_oss in mxfp4: "
            f"quant_method of {where} is {method!r:.100}"
        )
    return _READERS[method](config, where)


def _fp8(config: Config, where: str) -> tuple[Format, ...]:
    _require(config, where, fmt=(None, "e4m3", "float8_e4m3fn"), activation_scheme=(None, "dynamic", "static"))
    return (Plain(block=_block(config.get("weight_block_size"), where)),)


def _fbgemm_fp8(config: Config, where: str) -> tuple[Format, ...]:  # noqa: ARG001 (as all have)
    return (Plain(),)


def _modelopt(config: Config, where: str) -> tuple[Format, ...]:
    described = config.get("quantization", config)
    if not isinstance(described, dict):
        raise CheckpointError(f"{where}: quantization must be an object, got {described!r:.100}")
    if "quant_algo" in described and described["quant_algo"] is None:  # at most the KV cache was meant to be quantized
        return ()
    _require(described, where, quant_algo=(*MODELOPT_FORMATS, "MIXED_PRECISION"))
    if described["quant_algo"] != "MIXED_PRECISION":
        return (MODELOPT_FORMATS[described["quant_algo"]],)
    layers = described.get("quantized_layers")
    if not isinstance(layers, dict) or not all(isinstance(layer, dict) for layer in layers.values()) or not layers:
        raise CheckpointError(f"{where}: quantized_layers must be objects by module, got {layers!r:.100}")
    for name, layer in layers.items():
        _require(layer, f"quantized_layers of {where}: {name:.100}", quant_algo=(*MODELOPT_FORMATS,))
    return tuple(dict.fromkeys(MODELOPT_FORMATS[layer["quant_algo"]] for layer in layers.values()))


MODELOPT_FORMATS: dict[str, Format] = {
    **dict.fromkeys(("FP8", "MXFP8"), Plain()),
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4"), nvfp4.MODELOPT),
}
"""Formats of modelopt by its names; which of them a matrix has, its tensors show."""


def _bitsandbytes(config: Config, where: str) -> tuple[Format, ...]:
    four, eight = (bool(config.get(name, config.get(f"_{name}"))) for name in ("load_in_4bit", "load_in_8bit"))
    if four == eight:
        raise CheckpointError(f"{where}: one of load_in_4bit and load_in_8bit must be true")
    if four:
        _require(config, where, bnb_4bit_quant_type=(None, "nf4", "fp4"))
        return (bitsandbytes.FourBits(),)
    return (bitsandbytes.EightBits(),)


def _compressed_tensors(config: Config, where: str) -> tuple[Format, ...]:
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise CheckpointError(f"{where}: sparsity_config {sparsity!r:.100} is not supported")
    _require(config, where, quantization_status=(None, "compressed", "frozen"), transform_config=(None, {}))
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{where}: config_groups must be an object with at least one group, got {groups!r:.100}")
    return tuple(dict.fromkeys(_group(name, group, config, where) for name, group in groups.items()))


def _group(name: str, group: Any, config: Config, where: str) -> Format:
    """Return the format of one of compressed-tensors' groups, each of which may have its own."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise CheckpointError(f"{where}: config_groups.{name} must have an object of weights, got {group!r:.100}")
    where = f"config_groups.{name} of {where}"
    if group.get("output_activations"):
        raise CheckpointError(f"{where}: output_activations are not supported")
    kind = group.get("format") or config.get("format")
    bits, number = weights.get("num_bits"), weights.get("type")
    match kind, number, bits:
        case "float-quantized" | "naive-quantized", "float", 8:
            return Plain(block=_block(weights.get("block_structure"), where))
        case "int-quantized" | "naive-quantized", "int", 8:
            return Plain()
        case "mxfp8-quantized", "float", 8:
            return Plain()
        case "pack-quantized", "int", 2 | 4 | 8:
            return Packed(bits=bits)
        case "nvfp4-pack-quantized", "float", 4:
            return nvfp4.COMPRESSED_TENSORS
        case "mxfp4-pack-quantized", "float", 4 if weights.get("symmetric", True):
            return MXFP4()
    raise CheckpointError(f"{where}: {kind!r:.100} of {number!r:.100} weights of {bits!r:.20} bits is not supported")


def _gptq(config: Config, where: str) -> tuple[Format, ...]:
    label = "checkpoint_format" if config.get("checkpoint_format") is not None else "format"
    _require(config, where, bits=GPTQ_BITS, **{label: (None, "gptq", "gptq_v2")})
    is_symmetric = _flag(config, "sym", True, where)
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise CheckpointError(f"{where}: dynamic must be objects by pattern, got {dynamic!r:.100}")
    overrides = [
        _gptq_override(pattern, said, f"dynamic of {where}: {pattern:.100}", config["bits"], is_symmetric)
        for pattern, said in dynamic.items()
    ]
    is_version_2 = config.get(label) == "gptq_v2"
    return (
        GPTQ(bits=config["bits"], is_symmetric=is_symmetric, is_version_2=is_version_2, overrides=tuple(overrides)),
    )


GPTQ_BITS = (2, 4, 8)


def _gptq_override(pattern: str, said: Any, where: str, bits: int, is_symmetric: bool) -> Override:
    """Return an entry of `dynamic` as an Override: patterns after "-:" leave modules as floats, others change them."""
    if not isinstance(said, dict):
        raise CheckpointError(f"{where} must be an object, got {said!r:.100}")
    is_left = pattern.startswith("-:")
    expression = pattern.removeprefix("-:").removeprefix("+:")
    try:
        re.compile(expression)
    except re.error as error:
        raise CheckpointError(f"{where} is no regular expression that Python knows: {error}") from error
    if is_left:
        return Override(pattern=expression, bits=0, is_symmetric=is_symmetric)
    _require(said, where, bits=(None, *GPTQ_BITS))
    for name in said.keys() & {"format", "checkpoint_format", "method", "quant_method", "pack_dtype"}:
        raise CheckpointError(f"{where}: {name} is not supported, only other bits, groups and symmetry")
    return Override(
        pattern=expression, bits=said.get("bits") or bits, is_symmetric=_flag(said, "sym", is_symmetric, where)
    )


def _flag(config: Config, name: str, default: bool, where: str) -> bool:
    found = config.get(name, default)
    if not isinstance(found, bool):
        raise CheckpointError(f"{where}: {name} must be true or false, got {found!r:.100}")
    return found


def _awq(config: Config, where: str) -> tuple[Format, ...]:
    bits = "w_bit" if "w_bit" in config else "bits"
    version = config.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise CheckpointError(f"{where}: version {version!r:.100} is not supported, only gemm")
    _require(config, where, zero_point=(None, True), **{bits: (4,)})
    return (AWQ(),)


def _block(value: Any, where: str) -> tuple[int, int] | None:
    """Return the outputs and inputs of a block, None if there are no blocks."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(size, int) and size > 0 for size in value):
        raise CheckpointError(f"{where}: the size of a block must be two positive integers, got {value!r:.100}")
    return value[0], value[1]


def _require(config: Config, where: str, **served: tuple[Any, ...]) -> None:
    """Raise CheckpointError for a field that has none of the values that are served."""
    for name, values in served.items():
        found = config.get(name)
        if isinstance(found, float) or found not in values:
            known = ", ".join(str(value) for value in values if value is not None)
            raise CheckpointError(f"{where}: {name} {found!r:.100} is not supported, only {known}")


_READERS = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": _fbgemm_fp8,
    "fp8": _fp8,
    "gptq": _gptq,
    "modelopt": _modelopt,
}
"""The function that reads the config of each method."""
