"""Options that speak of a checkpoint's own files: the format that --quantization names, and values that take the place
of those in config.json and generation_config.json. No jax.

A model with such values is a directory of links to its files, and of the changed ones: all that read a model, also
other packages, read the same. It is removed at the end of the process that made it.
"""

import atexit
import dataclasses
import json
import logging
import pathlib
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any, get_args

from jaxserve.config import GENERATION_FIELDS, EngineConfig, StoredFormat
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.loading.json_files import read_config, read_object
from jaxserve.loading.model_types import check_model_type
from jaxserve.loading.multimodal import OF_BOTH, WRAPPERS

logger = logging.getLogger(__name__)

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"

_PREFIX, _ORIGIN = "jaxserve-overrides-", ".origin"

_FP8 = {"fp8", "fbgemm_fp8"}
_AUTOROUND = {"auto-round", "intel/auto-round"}
_METHODS = {
    "fp8": _FP8,
    "auto-round": _AUTOROUND,
    "awq_marlin": {"awq"},
    "gptq_marlin": {"gptq"},
    "gpt_oss_mxfp4": {"mxfp4"},
    "inc": _AUTOROUND,
    "modelopt_fp4": {"modelopt"},
    "modelopt_mixed": {"modelopt"},
    "modelopt_mxfp8": {"modelopt"},
    "moe_wna16": {"awq", "gptq"},
}
"""What a checkpoint says for vLLM's names of its format. Other names are said as they are."""

_RENAMED = {
    "rope_scaling": "rope_parameters",
    "rope_parameters": "rope_scaling",
    "type": "rope_type",
    "torch_dtype": "dtype",
    "dtype": "torch_dtype",
}
"""Fields of config.json that had another name in an earlier or later version of transformers."""

_OF_ANY_ROPE = ("rope_theta", "partial_rotary_factor")
"""Fields of rotary embedding that are not a kind's own. They may stand in its object, or next to it."""


def with_overrides(config: EngineConfig) -> EngineConfig:
    """Return the options of a model that is a path, with those that speak of its files carried out.

    Raises ConfigError for a format that the checkpoint has not, and for values that cannot be written or read.
    """
    is_fp8 = config.quantization == "fp8" and bool(_formats(config.model) & _FP8)
    if config.quantization in get_args(StoredFormat) or is_fp8:
        check_format(config.quantization, config.model)
        config = dataclasses.replace(config, quantization=None)
    changed = _changed_files(config)
    if not changed:
        return config
    directory = pathlib.Path(config.model)
    folder = pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / _ORIGIN).symlink_to(directory.resolve())
    model = folder / directory.resolve().name
    model.mkdir()
    for path in directory.iterdir():
        if path.name not in changed:
            (model / path.name).symlink_to(path.resolve())
    for name, fields in changed.items():
        (model / name).write_text(json.dumps(fields, indent=2), encoding="utf-8")
        try:
            read = (read_config if name == CONFIG else read_object)(model / name)
            if name == CONFIG and "model_type" in (config.hf_overrides or {}):
                check_model_type(read, model / name)
        except CheckpointError as error:
            option = "hf_overrides" if name == CONFIG else "override_generation_config"
            raise ConfigError(f"{option}: {str(error).removeprefix(f'{model / name}: ')}") from error
    return dataclasses.replace(
        config, model=str(model), hf_overrides=None, generation_config="auto", override_generation_config=None
    )


def origin(model: str) -> str:
    """Return the path of a model that callers know, which has the files before values were put in their place."""
    folder = pathlib.Path(model).parent
    link = folder / _ORIGIN
    return str(link.readlink()) if folder.name.startswith(_PREFIX) and link.is_symlink() else model


def check_format(name: str | None, model: str) -> None:
    """Raise ConfigError unless the model at this path is stored in the format that vLLM calls `name`."""
    said = _formats(model)
    if not said & _METHODS.get(str(name), {name}):
        words = f"its weights are stored by {', '.join(sorted(said))}" if said else "its weights are not quantized"
        raise ConfigError(f"quantization is {name}, but {model} says that {words}: leave it out")


def _formats(model: str) -> set[str]:
    """Return the formats in which a model says that its weights are stored, none if they are floats."""
    from jaxserve.loading.quantization_files import declared_methods  # imported late, as it needs NumPy

    path = pathlib.Path(model)
    return {"gguf"} if path.is_file() else set(map(str, declared_methods(path, read_config(path / CONFIG))))


def merged(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with changes: objects are merged, and other values replaced.

    A change has the name under which the config has the field. Rotary embedding of another kind keeps nothing of the
    one before but its base.
    """
    result = dict(fields)
    for name, value in changes.items():
        other = _RENAMED.get(name)
        if other is not None and other not in changes and fields.get(name) is None and fields.get(other) is not None:
            name = other
        before = fields.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            kinds = [each.get("rope_type", each.get("type")) for each in (before, value)]
            if None not in kinds and kinds[0] != kinds[1]:
                before = {name: before[name] for name in _OF_ANY_ROPE if name in before}
            value = merged(before, value)
        result[name] = value
    rope = result.get("rope_parameters")
    if isinstance(rope, Mapping) and "rope_parameters" not in changes:
        result["rope_parameters"] = {**rope, **{name: changes[name] for name in _OF_ANY_ROPE if name in changes}}
    return result


def _changed_files(config: EngineConfig) -> dict[str, dict[str, Any]]:
    """Return the contents of the files that options change, by name."""
    directory, source, values = pathlib.Path(config.model), config.generation_config, config.override_generation_config
    changed: dict[str, dict[str, Any]] = {}
    if directory.is_file():
        if config.hf_overrides or values or source not in ("auto", "vllm"):
            raise ConfigError(
                "hf_overrides, generation_config and override_generation_config change files of a model directory, "
                f"and {directory} is a GGUF file"
            )
        return changed
    if config.hf_overrides:
        fields = read_object(directory / CONFIG)
        changed[CONFIG] = merged(fields, _within_text(fields, config.hf_overrides))
        if new := sorted(changed[CONFIG].keys() - fields.keys()):
            logger.warning("hf_overrides: config.json has had no %s", ", ".join(new))
    if source != "auto" or values:
        given = _generation_config(directory if source in ("auto", "vllm") else pathlib.Path(source))
        if source == "vllm":
            given = {name: value for name, value in given.items() if name not in GENERATION_FIELDS}
        changed[GENERATION_CONFIG] = given | (values or {})
    return changed


def _within_text(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return changes of a config.json, where fields of the language model in it go into its own config."""
    wrapper = WRAPPERS.get(str(fields.get("model_type")))
    if wrapper is None or not isinstance(fields.get(wrapper.key), dict):
        return changes
    beside = {name: value for name, value in changes.items() if name in fields or name in OF_BOTH}
    inner = {name: value for name, value in changes.items() if name not in beside}
    own = beside.get(wrapper.key) or {}
    return {**beside, wrapper.key: {**inner, **own}} if inner and isinstance(own, Mapping) else beside | inner


def _generation_config(directory: pathlib.Path) -> dict[str, Any]:
    """Return the generation_config.json of a directory; a model need not have one."""
    file = directory / GENERATION_CONFIG
    if not file.is_file() and not (directory / CONFIG).is_file():
        raise ConfigError(f"generation_config must be auto, vllm or a directory with {GENERATION_CONFIG}: {directory}")
    return read_object(file) if file.is_file() else {}
