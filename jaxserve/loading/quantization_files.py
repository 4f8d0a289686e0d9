"""What a model directory says about how its weights are stored, in whichever of its JSON files. No jax.

Converters write that into config.json under several names, or into a file beside it. All of it is looked at before any
weight is downloaded or read, so that a model is never served by numbers that mean something else.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.loading.json_files import read_object

FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quantization_config.json": None,
    "quantization_map.json": "quanto",
    "quant_model_description.json": "ascend",
    "smash_config.json": "pruna",
}
"""Files beside config.json that converters write, and whose they are; None: they say that themselves."""
FIELDS = {"quantization_config": None, "compression_config": "compressed-tensors", "quantization": "mlx"}
"""The same for fields of config.json."""
ADAPTER = "adapter_config.json"

NAMES = (*FILES, ADAPTER)
"""Every file that is looked for."""


def check_storage(directory: pathlib.Path, fields: Mapping[str, Any]) -> None:
    """Raise CheckpointError, naming file and field, for weights that need something done to them that is not served.

    `fields` are those of config.json.
    """
    if (directory / ADAPTER).is_file():
        raise CheckpointError(
            f"{directory / ADAPTER}: adapters are not supported: merge it into its base model, for example by "
            "merge_and_unload() of peft, and save that"
        )
    for where, method in declared_methods(directory, fields).items():
        if method == "mxfp4" and fields.get("model_type") == "gpt_oss":
            continue
        raise CheckpointError(
            f"{directory}: quantized checkpoints are not supported, other than gpt_oss in mxfp4: quant_method of "
            f"{where} is {method!r:.100}"
        )


def declared_methods(directory: pathlib.Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The method of quantization that each file or field is about, by their names in words."""
    found: dict[str, Any] = {}
    for name, method in FIELDS.items():
        content = fields.get(name)
        if content is not None and not isinstance(content, dict):
            raise CheckpointError(f"{directory / 'config.json'}: {name} must be an object, got {content!r:.100}")
        if content:
            found[f"{name} in its config.json"] = content.get("quant_method") or method
    for name, method in FILES.items():
        if (directory / name).is_file():
            content = read_object(directory / name)
            found[name] = method or content.get("quant_method")
    return found
