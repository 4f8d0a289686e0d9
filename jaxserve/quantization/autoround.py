"""Checkpoints of AutoRound: matrices in the layout of GPTQ or of AWQ, some modules with bits of their own."""

import functools
import re
from typing import Any

import msgspec

from jaxserve.errors import CheckpointError
from jaxserve.quantization.awq import AWQ
from jaxserve.quantization.gptq import BITS, GPTQ, Override
from jaxserve.quantization.method import HEAD, Config, Method, group_of, integers, require
from jaxserve.quantization.scheme import Scheme
from jaxserve.quantization.stored import Format

VERSION_1 = ("auto_round:auto_gptq", "auto_round:gptq", "auto")
VERSION_2 = ("auto_round", "auto_round:gptqmodel")
OF_AWQ = ("auto_round:auto_awq", "auto_round:awq")
"""Values of `packing_format` by their layout: GPTQ with zero points less 1, GPTQ with those as they are, and AWQ."""

FLOATS = 16
"""The smallest number of bits by which a config says that a module is stored as floats."""
_SPECIAL = frozenset("*+?^$()[]{}|\\")


def is_name(key: str) -> bool:
    """Return true if a key of `extra_config` is the name of a module of one layer, or the end of one: it has a number
    between dots. Others are regular expressions, also without special characters ("v_proj"), that are searched for.
    """
    return _SPECIAL.isdisjoint(key) and any(part.isdecimal() for part in key.split("."))


def _formats(config: Config, where: str) -> tuple[Format, ...]:
    require(config, where, packing_format=(None, *VERSION_1, *VERSION_2, *OF_AWQ))
    _check(config, where)
    packing = config.get("packing_format")
    extra = config.get("extra_config") or {}
    if not isinstance(extra, dict) or not all(isinstance(said, dict) for said in extra.values()):
        raise CheckpointError(f"{where}: extra_config must be objects by module, got {extra!r:.100}")
    overrides = [(key, {**config, **said}) for key, said in _in_order(extra)]
    for key, said in overrides:
        _check(said, f"extra_config of {where}: {key:.100}")
    quantized = [said for said in (config, *(said for _, said in overrides)) if not _is_floats(said["bits"])]
    if packing in OF_AWQ:
        for said in quantized:
            require(said, where, bits=(4,))
        return (AWQ(),)
    if packing is None and not all(said["sym"] for said in quantized):
        raise CheckpointError(f"{where}: packing_format must say how zero points are stored where sym is false")
    return (
        GPTQ(
            bits=config["bits"],
            is_symmetric=config.get("sym", True),  # what is stored as floats may say neither this nor the group's size
            is_version_2=packing in VERSION_2,
            group_size=config.get("group_size"),
            overrides=tuple(_override(key, said, where) for key, said in overrides),
        ),
    )


def _check(said: Config, where: str) -> None:
    """Raise CheckpointError for what is not supported in a config, or in what it says of some modules."""
    if _is_floats(said.get("bits")):
        return
    require(said, where, data_type=(None, "int"), rotation_config=(None, {}), super_bits=(None,), bits=BITS)
    if not _is_floats(said.get("act_bits") or FLOATS):
        raise CheckpointError(f"{where}: act_bits {said['act_bits']!r:.100} is not supported, only {FLOATS}")
    size, is_symmetric = said.get("group_size"), said.get("sym")
    if type(size) is not int or not (size > 0 or size == -1):
        raise CheckpointError(f"{where}: group_size must be a positive integer or -1, got {size!r:.100}")
    if not isinstance(is_symmetric, bool):
        raise CheckpointError(f"{where}: sym must be true or false, got {is_symmetric!r:.100}")


def _is_floats(bits: Any) -> bool:
    return isinstance(bits, int) and bits >= FLOATS


def _in_order(extra: Config) -> list[tuple[str, Any]]:
    """Return the entries of `extra_config`, names of modules before patterns, without values that are null."""
    said = [(key, {name: value for name, value in each.items() if value is not None}) for key, each in extra.items()]
    return sorted(said, key=lambda entry: not is_name(entry[0]))


@functools.lru_cache(maxsize=4)
def _patterns(extra: bytes) -> list[tuple[re.Pattern[str], Config]]:
    """Return `_in_order` of an `extra_config`, written as JSON, with patterns that match names of modules."""
    return [(re.compile(_expression(key)), said) for key, said in _in_order(msgspec.json.decode(extra))]


def _expression(key: str) -> str:
    """Return the expression that matches names of modules from their beginning as a key applies to them."""
    return rf"(?:.*\.)?{re.escape(key)}(?:\.|\Z)" if is_name(key) else rf"(?:.*?)(?:{key})"


def _override(key: str, said: Config, where: str) -> Override:
    try:
        re.compile(_expression(key))
    except re.error as error:
        raise CheckpointError(
            f"extra_config of {where}: {key:.100} is no regular expression that Python knows: {error}"
        ) from error
    return Override(
        pattern=_expression(key),
        bits=0 if _is_floats(said["bits"]) else said["bits"],
        is_symmetric=said.get("sym", True),
        group_size=said.get("group_size"),
    )


def _said(config: Config, module: str) -> Config | None:
    """Return what `extra_config` says of a module, None if it does not say anything."""
    entries = _patterns(msgspec.json.encode(config.get("extra_config") or {}))
    return next((said for pattern, said in entries if pattern.match(module)), None)


def _scheme(config: Config, module: str) -> Scheme:
    said = {**config, **(_said(config, module) or {})}
    has_zeros = config.get("packing_format") in OF_AWQ or not said["sym"]
    size = group_of(said["group_size"])
    return integers(said["bits"], is_symmetric=not has_zeros, size=size, scale_dtype="float16")


def _leaves(config: Config, module: str) -> bool:
    said = _said(config, module)
    return (said is None and module == HEAD) or _is_floats({**config, **(said or {})}.get("bits"))


METHOD = Method(formats=_formats, scheme=_scheme, leaves=_leaves, has_head=True)
