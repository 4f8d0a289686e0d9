"""How weights are quantized: schemes of codes, formats of checkpoints, and the methods that configs name. No jax."""

from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.quantization import awq, bitsandbytes, compressed_tensors, gptq, modelopt, mxfp4, plain
from jaxserve.quantization.method import Config, Method
from jaxserve.quantization.stored import Format

METHODS: dict[str, Method] = {
    "awq": awq.METHOD,
    "bitsandbytes": bitsandbytes.METHOD,
    "compressed-tensors": compressed_tensors.METHOD,
    "fbgemm_fp8": plain.FBGEMM_FP8,
    "fp8": plain.FP8,
    "gptq": gptq.METHOD,
    "modelopt": modelopt.METHOD,
    "mxfp4": mxfp4.METHOD,
}
"""The methods of quantized checkpoints, by `quant_method` of their configs."""


def formats_of(name: Any, config: Config, where: str) -> tuple[Format, ...]:
    """Return the formats that matrices of a checkpoint may have.

    `config` is the object that describes the method of this name; `where` names it in errors. Raises CheckpointError,
    naming what is not supported.
    """
    readers = {name: method.formats for name, method in METHODS.items() if method.formats is not None}
    if not isinstance(name, str) or name not in readers:
        raise CheckpointError(
            f"quantized checkpoints are not supported, other than {', '.join(readers)} and gpt_oss in mxfp4: "
            f"quant_method of {where} is {name!r:.100}"
        )
    return readers[name](config, where)
