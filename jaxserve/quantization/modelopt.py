"""Checkpoints of NVIDIA's modelopt: matrices in the formats `plain` and `nvfp4`, all in one or each as listed."""

import fnmatch

from jaxserve.errors import CheckpointError
from jaxserve.quantization import nvfp4, plain
from jaxserve.quantization.method import Config, Method, is_within, require
from jaxserve.quantization.scheme import Scheme
from jaxserve.quantization.stored import Format

_FP8, _MXFP8 = (plain.Plain(), Scheme(codes="fp8")), (plain.Plain(), plain.MXFP8)
_NVFP4 = nvfp4.MODELOPT, nvfp4.SCHEME
ALGORITHMS: dict[str, tuple[Format, Scheme]] = {"FP8": _FP8, "MXFP8": _MXFP8, "NVFP4": _NVFP4, "W4A16_NVFP4": _NVFP4}
"""Formats and schemes by modelopt's names; which of the formats a matrix has, its tensors show."""


def _formats(config: Config, where: str) -> tuple[Format, ...]:
    described = config.get("quantization", config)
    if not isinstance(described, dict):
        raise CheckpointError(f"{where}: quantization must be an object, got {described!r:.100}")
    if "quant_algo" in described and described["quant_algo"] is None:  # at most the KV cache was meant to be quantized
        return ()
    require(described, where, quant_algo=(*ALGORITHMS, "MIXED_PRECISION"))
    if described["quant_algo"] != "MIXED_PRECISION":
        return (ALGORITHMS[described["quant_algo"]][0],)
    layers = described.get("quantized_layers")
    if not isinstance(layers, dict) or not all(isinstance(layer, dict) for layer in layers.values()) or not layers:
        raise CheckpointError(f"{where}: quantized_layers must be objects by module, got {layers!r:.100}")
    for name, layer in layers.items():
        require(layer, f"quantized_layers of {where}: {name:.100}", quant_algo=(*ALGORITHMS,))
    return tuple(dict.fromkeys(ALGORITHMS[layer["quant_algo"]][0] for layer in layers.values()))


def _scheme(config: Config, module: str) -> Scheme | None:
    algorithm = config.get("quant_algo")
    if algorithm == "MIXED_PRECISION":
        algorithm = config["quantized_layers"].get(module, {}).get("quant_algo")
    return None if algorithm is None else ALGORITHMS[algorithm][1]


def _leaves(config: Config, module: str) -> bool:
    left = (*(config.get("exclude_modules") or ()), *(config.get("ignore") or ()))
    return any(fnmatch.fnmatchcase(module, name) or is_within(module, name) for name in left)


METHOD = Method(formats=_formats, scheme=_scheme, leaves=_leaves, nested="quantization", has_head=True)
