"""What the JSON files of a model directory say about how its weights are stored. No jax.

Converters write this into config.json under several names, or into a file next to it. All of it is checked before any
weight is downloaded or read, so that a model is never served from misinterpreted numbers.
"""

import logging
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxserve.config import KVCacheDType
from jaxserve.errors import CheckpointError
from jaxserve.loading.json_files import read_object
from jaxserve.loading.multimodal import TEXT_OF, stored_names, text_name
from jaxserve.quantization import autoround, awq, bitsandbytes, compressed_tensors, gptq, modelopt, mxfp4, plain
from jaxserve.quantization.method import Config, Expected, Method
from jaxserve.quantization.stored import Format

METHODS: dict[str, Method] = {
    "auto-round": autoround.METHOD,
    "awq": awq.METHOD,
    "bitsandbytes": bitsandbytes.METHOD,
    "compressed-tensors": compressed_tensors.METHOD,
    "fbgemm_fp8": plain.FBGEMM_FP8,
    "fp8": plain.FP8,
    "gptq": gptq.METHOD,
    "intel/auto-round": autoround.METHOD,
    "modelopt": modelopt.METHOD,
    "mxfp4": mxfp4.METHOD,
}
"""The methods of quantized checkpoints, by `quant_method` of their configs."""

FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quantization_config.json": None,
    "quantization_map.json": "quanto",
    "quant_model_description.json": "ascend",
    "smash_config.json": "pruna",
}
"""Files that converters write next to config.json, and their method unless they name another one; None: they do."""
FIELDS = {"quantization_config": None, "compression_config": "compressed-tensors", "quantization": "mlx"}
"""Fields of config.json that describe quantization, and their method; None: they name it themselves."""
MARKERS = ("quant", "load_in_4bit", "load_in_8bit", "sparsity_config", "bnb_", "hqq_")
"""Parts of names of fields and files by which converters declare, or might declare, that weights are encoded."""
ADAPTER = "adapter_config.json"
_KV_CACHES: dict[str, KVCacheDType] = {
    str(("float", 8)): "fp8",
    str(("int", 8)): "int8",
    "FP8": "fp8",
    "FP8_E4M3": "fp8",
    "INT8": "int8",
}
"""How caches are held, by the type and the bits of a `kv_cache_scheme` or the name of a `kv_cache_quant_algo`."""

logger = logging.getLogger(__name__)


def stored_formats(directory: pathlib.Path, fields: Mapping[str, Any]) -> tuple[Format, ...]:
    """Return the formats that matrices may have, none if all are floats. `fields` are those of config.json.

    Raises CheckpointError, naming file and field, for weights that need unsupported processing, and for contradictory
    declarations.
    """
    if (directory / ADAPTER).is_file():
        raise CheckpointError(
            f"{directory / ADAPTER}: adapters are not supported: merge it into its base model, for example by "
            "merge_and_unload() of peft, and save that"
        )
    found: dict[str, tuple[Format, ...]] = {}
    for where, (method, content) in _declared(directory, fields).items():
        if method == "mxfp4" and fields.get("model_type") == "gpt_oss":
            continue
        try:
            found[where] = _formats_of(method, content, where)
        except CheckpointError as error:
            raise CheckpointError(f"{directory}: {error}") from error
    if len(set(found.values())) > 1:
        raise CheckpointError(f"{directory}: {' and '.join(found)} contradict each other")
    return next(iter(found.values()), ())


def expected_schemes(directory: pathlib.Path, fields: Mapping[str, Any]) -> Expected | None:
    """Return what a directory whose weights are not there says of their formats; None if all are floats.

    Raises CheckpointError as `stored_formats` does.
    """
    stored_formats(directory, fields)
    for method, content in _declared(directory, fields).values():
        return Expected(METHODS[method], content, stored_names if TEXT_OF in fields else None)
    return None


def declared_methods(directory: pathlib.Path, fields: Mapping[str, Any]) -> set[Any]:
    """Return the methods that a directory names; none if all weights are floats. Raises CheckpointError."""
    return {method for method, _ in _declared(directory, fields).values()}


def resolve_kv_cache_dtype(
    requested: KVCacheDType, path: str | pathlib.Path, fields: Mapping[str, Any]
) -> KVCacheDType:
    """Return how keys and values are held: as requested, and with "auto" as the checkpoint says if it does, as vLLM
    does. Raises CheckpointError for places that contradict each other.
    """
    directory = pathlib.Path(path)
    said = declared_kv_caches(directory, fields) if directory.is_dir() else {}
    for where, (dtype, value) in said.items():
        if requested != "auto":
            logger.info("%s is %s, but --kv-cache-dtype is %s, which counts", where, value, requested)
        elif dtype is None:
            logger.warning("%s is %s, which is not supported: keys and values are not quantized", where, value)
        else:
            logger.info("kv_cache_dtype is %s, as %s says: %s", dtype, where, value)
    dtypes: set[KVCacheDType] = {dtype for dtype, _ in said.values() if dtype is not None}
    if requested != "auto" or not dtypes:
        return requested
    if len(dtypes) > 1:
        raise CheckpointError(f"{directory}: {' and '.join(said)} contradict each other: choose a --kv-cache-dtype")
    return dtypes.pop()


def declared_kv_caches(
    directory: pathlib.Path, fields: Mapping[str, Any]
) -> dict[str, tuple[KVCacheDType | None, str]]:
    """Return how keys and values are held by places where a directory says so, None if that is not supported, and what
    it says. Raises CheckpointError.
    """
    found: dict[str, tuple[KVCacheDType | None, str]] = {}
    for where, (_, content) in _declared(directory, fields).items():
        nested = content.get("quantization")
        for said in (content, nested if isinstance(nested, dict) else {}):
            if (scheme := said.get("kv_cache_scheme")) is not None:
                kind = (scheme.get("type"), scheme.get("num_bits")) if isinstance(scheme, dict) else scheme
                found[f"{where}: kv_cache_scheme"] = _KV_CACHES.get(str(kind)), f"{scheme!r:.200}"
            if (algorithm := said.get("kv_cache_quant_algo")) is not None:
                found[f"{where}: kv_cache_quant_algo"] = _KV_CACHES.get(str(algorithm).upper()), f"{algorithm!r:.200}"
    return found


def rounds_to_integers(fields: Mapping[str, Any]) -> bool:
    """Return true if a config says that activations are rounded to integers of 8 bits: W8A8 of compressed-tensors."""
    described = fields.get("quantization_config") or fields.get("compression_config") or {}
    groups = described.get("config_groups") or {}
    activations = [group.get("input_activations") or {} for group in groups.values()]
    return any(each.get("num_bits") == 8 and each.get("type") == "int" for each in activations)


def _declared(directory: pathlib.Path, fields: Mapping[str, Any]) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return the method and the object of each file or field about quantization, by a description of where it is.

    A field that names no method is left out if a file does.
    """
    found: dict[str, tuple[Any, dict[str, Any]]] = {}
    unknown = [f"{name} of its config.json" for name in _unknown_fields(fields)]
    unknown += sorted(
        path.name for path in directory.glob("*.json") if _is_marker(path.stem) and path.name not in FILES
    )
    if unknown:
        raise CheckpointError(
            f"{directory}: {' and '.join(unknown)} may say how weights are quantized, in a way that is not known: "
            f"known are {', '.join((*FIELDS, *FILES))}"
        )
    for name, method in FIELDS.items():
        content = fields.get(name)
        if content is not None and not isinstance(content, dict):
            raise CheckpointError(f"{directory / 'config.json'}: {name} must be an object, got {content!r:.100}")
        if content:
            found[f"{name} in its config.json"] = content.get("quant_method") or method or _producer(content), content
    for name, method in FILES.items():
        if (directory / name).is_file():
            content = read_object(directory / name)
            found[name] = content.get("quant_method") or method, content
    has_file = any(method for where, (method, _) in found.items() if where in FILES)
    return {
        where: (method, _with_stored_names(content) if TEXT_OF in fields else content)
        for where, (method, content) in found.items()
        if method or where in FILES or not has_file
    }


def _with_stored_names(content: dict[str, Any]) -> dict[str, Any]:
    """Return the object of a multimodal checkpoint with AutoRound's modules by all names that they may have."""
    extra = content.get("extra_config")
    if not isinstance(extra, dict):
        return content
    names = {key: stored_names(text_name(key) or key) for key in extra if autoround.is_name(key)}
    return content | {"extra_config": extra | {name: extra[key] for key, found in names.items() for name in found}}


def _formats_of(name: Any, config: Config, where: str) -> tuple[Format, ...]:
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
    for field in ("rotation", "adapter"):  # GPTQModel transforms the inputs of matrices, or adds a product to theirs
        if config.get(field):
            raise CheckpointError(f"{where}: {field} {config[field]!r:.100} is not supported")
    return readers[name](config, where)


def _producer(content: Mapping[str, Any]) -> str | None:
    """Return the method of an object without one by its producer: modelopt names itself so."""
    producer = content.get("producer")
    return "modelopt" if isinstance(producer, dict) and producer.get("name") == "modelopt" else None


def _unknown_fields(fields: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return names of fields that mention quantization and are not supported, including those of objects in the
    config.
    """
    found = []
    for name, value in fields.items():
        if not value or (not prefix and name in FIELDS):
            continue
        if _is_marker(name):
            found.append(f"{prefix}{name}")
        elif isinstance(value, dict) and not prefix:
            found += _unknown_fields(value, f"{name}.")
    return found


def _is_marker(name: str) -> bool:
    return any(part in name.lower() for part in MARKERS)
