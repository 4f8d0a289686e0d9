"""Checkpoints of compressed-tensors: groups of matrices, each in a format that other files here read."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxserve.errors import CheckpointError
from jaxserve.quantization import mxfp4, nvfp4
from jaxserve.quantization.method import Config, Method, block_of, group_of, integers, require
from jaxserve.quantization.packed import Packed
from jaxserve.quantization.plain import MXFP8, Plain
from jaxserve.quantization.scheme import CodeName, Scheme
from jaxserve.quantization.stored import Format


class _Kind(NamedTuple):
    """How matrices of one format and one type of numbers are stored and held. `weights` is a group's object."""

    bits: tuple[int, ...]
    format: Callable[[Config, str], Format]
    """(weights, what names them in errors) -> the format"""
    scheme: Callable[[Config], Scheme]
    is_symmetric: bool = False
    """Zero points are not supported."""


def _packed(weights: Config, where: str) -> Format:  # noqa: ARG001
    return Packed(bits=weights["num_bits"])


def _integers(weights: Config) -> Scheme:
    is_symmetric, size = weights.get("symmetric", True), group_of(weights.get("group_size"))
    return integers(weights["num_bits"], is_symmetric=is_symmetric, size=size, scale_dtype="bfloat16")


def _in_8_bits(codes: CodeName) -> Callable[[Config], Scheme]:
    def scheme(weights: Config) -> Scheme:
        block = weights.get("block_structure")
        size = block[1] if block else group_of(weights.get("group_size"))
        return Scheme(codes=codes, group_size=size, scale_dtype="bfloat16")

    return scheme


def _always[T](value: T) -> Callable[..., T]:
    return lambda *_: value


_FLOATS = _Kind(
    (8,), lambda weights, where: Plain(block=block_of(weights.get("block_structure"), where)), _in_8_bits("fp8")
)
_INTEGERS = _Kind((8,), _always(Plain()), _in_8_bits("int8"))
_KINDS: dict[tuple[Any, Any], _Kind] = {
    ("float-quantized", "float"): _FLOATS,
    ("naive-quantized", "float"): _FLOATS,
    ("int-quantized", "int"): _INTEGERS,
    ("naive-quantized", "int"): _INTEGERS,
    ("mxfp8-quantized", "float"): _Kind((8,), _always(Plain()), _always(MXFP8)),
    ("pack-quantized", "int"): _Kind((2, 4, 8), _packed, _integers),
    ("nvfp4-pack-quantized", "float"): _Kind((4,), _always(nvfp4.COMPRESSED_TENSORS), _always(nvfp4.SCHEME)),
    ("mxfp4-pack-quantized", "float"): _Kind((4,), _always(mxfp4.MXFP4()), _always(mxfp4.SCHEME), is_symmetric=True),
}
"""By the format of a group and the type of its numbers."""


def _formats(config: Config, where: str) -> tuple[Format, ...]:
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise CheckpointError(f"{where}: sparsity_config {sparsity!r:.100} is not supported")
    require(config, where, quantization_status=(None, "compressed", "frozen"), transform_config=(None, {}))
    groups = config.get("config_groups")
    if groups == {} and config.get("kv_cache_scheme") is not None:
        return ()  # keys and values alone are quantized
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{where}: config_groups must be an object with at least one group, got {groups!r:.100}")
    return tuple(dict.fromkeys(_format(name, group, config, where) for name, group in groups.items()))


def _format(name: str, group: Any, config: Config, where: str) -> Format:
    """Return the format of one of the groups, each of which may have its own."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise CheckpointError(f"{where}: config_groups.{name} must have an object of weights, got {group!r:.100}")
    where = f"config_groups.{name} of {where}"
    if group.get("output_activations"):
        raise CheckpointError(f"{where}: output_activations are not supported")
    named, bits = _name(group, config), weights.get("num_bits")
    kind = _KINDS.get(named) if all(isinstance(each, str) for each in named) else None
    if kind is None or bits not in kind.bits or (kind.is_symmetric and not weights.get("symmetric", True)):
        stored, number = named
        raise CheckpointError(
            f"{where}: {stored!r:.100} of {number!r:.100} weights of {bits!r:.20} bits is not supported"
        )
    return kind.format(weights, where)


def _name(group: Config, config: Config) -> tuple[Any, Any]:
    return group.get("format") or config.get("format"), group["weights"].get("type")


def _scheme(config: Config, module: str) -> Scheme | None:
    for group in config["config_groups"].values():
        if any(_is_target(module, name) for name in group.get("targets") or ("Linear",)):
            return _KINDS[_name(group, config)].scheme(group["weights"])
    return None


def _leaves(config: Config, module: str) -> bool:
    return any(_is_target(module, name) for name in config.get("ignore") or ())


def _is_target(module: str, name: str) -> bool:
    """Return true if an entry of `targets` or `ignore` means a module: a pattern, its class, or its name."""
    if name.startswith("re:"):
        return re.match(name.removeprefix("re:"), module) is not None
    return name in ("Linear", module)


METHOD = Method(formats=_formats, scheme=_scheme, leaves=_leaves, has_head=True)
