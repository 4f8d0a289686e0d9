"""Matrices as GPTQ's packages write them: words along the inputs, [inputs / 8, outputs], and a group for each input.

Version 1 of the format (`checkpoint_format` "gptq") stores zero points less 1, version 2 ("gptq_v2") as they are. Where
codes are symmetric, the zero point is the middle whatever the file says: labels of versions are not to be trusted.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.quantization.common import regrouped
from jaxserve.quantization.method import Config, Method, group_of, integers, require
from jaxserve.quantization.scheme import Scheme
from jaxserve.quantization.stored import Codes, Format, Header, scheme_of_integers, unpack

_REQUIRED = ("qweight", "qzeros", "scales", "g_idx")
BITS = (2, 4, 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Override:
    """What a config specifies for the modules whose names begin with a match of a pattern, instead of its general
    values.

    Modules that a config leaves as floats are recognized by their tensors, but no later override applies to them: their
    `bits` are 0.
    """

    pattern: str
    bits: int
    is_symmetric: bool
    group_size: int | None = None
    """Inputs of a group of a matrix without g_idx, -1 for all; None if the modules have those of the others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTQ:
    """Unsigned integers of 2, 4 or 8 bits with zero points."""

    bits: int
    is_symmetric: bool
    is_version_2: bool
    group_size: int | None = None
    """Inputs of a group of a matrix without g_idx, -1 for all; None refuses such matrices."""
    overrides: tuple[Override, ...] = ()

    def of(self, module: str) -> "GPTQ":
        """Return the format of a module: with the first override that applies to it, if there is one."""
        if module not in self._of_modules:
            applies = (override for pattern, override in self._patterns if pattern.match(module))
            self._of_modules[module] = self._with(next(applies, None))
        return self._of_modules[module]

    @functools.cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], Override]]:
        return [(re.compile(override.pattern), override) for override in self.overrides]

    @functools.cached_property
    def _of_modules(self) -> dict[str, "GPTQ"]:
        return {}

    def _with(self, override: Override | None) -> "GPTQ":
        if override is None:
            return self
        return GPTQ(
            bits=override.bits or self.bits,
            is_symmetric=override.is_symmetric,
            is_version_2=self.is_version_2,
            group_size=override.group_size or self.group_size,
        )

    def parts(self, leaves: Mapping[str, Header]) -> tuple[str, ...] | None:
        """Return the names of codes, zero points, scales and groups."""
        return tuple(name for name in _REQUIRED if name in leaves) if "qweight" in leaves else None

    def shape(self, module: str, headers: Mapping[str, Header]) -> tuple[int, int]:
        """Return the shape implied by the sizes of the words."""
        said = self.of(module)
        required = [name for name in _REQUIRED if name != "g_idx" or said.group_size is None]
        if missing := [name for name in required if name not in headers]:
            raise CheckpointError(f"{module}: tensors missing beside qweight: {', '.join(missing)}")
        (dtype, words, _), scales = headers["qweight"], headers["scales"].shape
        per_word = 32 // said.bits
        if dtype != "I32" or len(words) != 2 or len(scales) != 2 or scales[1] != words[1]:
            raise CheckpointError(f"{module}: qweight {dtype} {list(words)} and scales {list(scales)} do not fit")
        inputs, outputs = words[0] * per_word, words[1]
        expected = {"qzeros": (scales[0], -(-outputs // per_word)), "g_idx": (inputs,)}
        if "g_idx" not in headers:
            expected = {"qzeros": expected["qzeros"], "scales": (-(-inputs // said.run(inputs)), outputs)}
        for name, shape in expected.items():
            if headers[name].shape != shape:
                raise CheckpointError(f"{module}.{name} is {list(headers[name].shape)} and not {list(shape)}")
        return outputs, inputs

    def scheme(self, module: str, headers: Mapping[str, Header]) -> Scheme | str:
        """Return the scheme of the integers, those of 2 bits in 4."""
        said, scales = self.of(module), headers["scales"]
        num_inputs, num_groups = headers["qweight"].shape[0] * (32 // said.bits), scales.shape[0]
        in_runs = num_inputs if "g_idx" in headers else num_groups * said.run(num_inputs)
        scheme = scheme_of_integers(
            said.bits, has_zeros=not said.is_symmetric, scales=scales, num_inputs=in_runs, num_groups=num_groups
        )
        return scheme if isinstance(scheme, str) else regrouped(scheme, num_inputs)

    def run(self, num_inputs: int) -> int:
        """Return the inputs of a group of a matrix without g_idx, whose last group may have fewer."""
        return num_inputs if self.group_size in (None, -1) else min(self.group_size, num_inputs)

    def read(self, module: str, tensors: Mapping[str, np.ndarray]) -> Codes:
        """Return the codes with outputs first, and the zero points that count."""
        said, scales, groups = self.of(module), tensors["scales"].T, tensors.get("g_idx")
        values = unpack(tensors["qweight"], said.bits, axis=0).T
        if groups is None:
            groups = np.arange(values.shape[1]) // said.run(values.shape[1])
        if not ((groups >= 0) & (groups < scales.shape[1])).all():
            raise CheckpointError(f"{module}.g_idx names groups that are not there")
        bits, middle = said.bits, 2 ** (said.bits - 1)
        words = tensors["qzeros"].view(np.uint32)
        if not (said.is_version_2 or said.is_symmetric):
            # Version 1 subtracts 1 from each zero point of a word by one subtraction, which borrows below 0.
            words = words + np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
        stored = unpack(words, bits, axis=1)[:, : len(scales)].T
        if said.is_symmetric:
            if not np.isin(stored, (middle - 1, middle)).all():
                raise CheckpointError(f"{module}.qzeros: codes are said to be symmetric, and zero points are not")
            stored = np.full_like(stored, middle)
        return Codes(values=values, scales=scales, zeros=stored, groups=groups)


def _formats(config: Config, where: str) -> tuple[Format, ...]:
    label = "checkpoint_format" if config.get("checkpoint_format") is not None else "format"
    require(config, where, bits=BITS, **{label: (None, "gptq", "gptq_v2")})
    is_symmetric = _flag(config, "sym", True, where)
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise CheckpointError(f"{where}: dynamic must be objects by pattern, got {dynamic!r:.100}")
    overrides = [
        _override(pattern, said, f"dynamic of {where}: {pattern:.100}", config["bits"], is_symmetric)
        for pattern, said in dynamic.items()
    ]
    is_version_2 = config.get(label) == "gptq_v2"
    return (
        GPTQ(bits=config["bits"], is_symmetric=is_symmetric, is_version_2=is_version_2, overrides=tuple(overrides)),
    )


def _override(pattern: str, said: Any, where: str, bits: int, is_symmetric: bool) -> Override:
    """Return an entry of `dynamic` as an Override: patterns after "-:" leave modules as floats, others change them."""
    if not isinstance(said, dict):
        raise CheckpointError(f"{where} must be an object, got {said!r:.100}")
    try:
        re.compile(_expression(pattern))
    except re.error as error:
        raise CheckpointError(f"{where} is no regular expression that Python knows: {error}") from error
    if pattern.startswith("-:"):
        return Override(pattern=_expression(pattern), bits=0, is_symmetric=is_symmetric)
    require(said, where, bits=(None, *BITS))
    for name in said.keys() & {"format", "checkpoint_format", "method", "quant_method", "pack_dtype"}:
        raise CheckpointError(f"{where}: {name} is not supported, only other bits, groups and symmetry")
    return Override(
        pattern=_expression(pattern),
        bits=said.get("bits") or bits,
        is_symmetric=_flag(said, "sym", is_symmetric, where),
    )


def _expression(pattern: str) -> str:
    """Return the regular expression of an entry of `dynamic`, without its sign."""
    return pattern.removeprefix("-:").removeprefix("+:")


def _flag(config: Config, name: str, default: bool, where: str) -> bool:
    found = config.get(name, default)
    if not isinstance(found, bool):
        raise CheckpointError(f"{where}: {name} must be true or false, got {found!r:.100}")
    return found


def _entry(config: Config, module: str) -> str | None:
    """Return the first pattern of `dynamic` that matches a module."""
    return next((each for each in config.get("dynamic") or {} if re.match(_expression(each), module)), None)


def _scheme(config: Config, module: str) -> Scheme:
    pattern = _entry(config, module)
    said = {**config, **({} if pattern is None else config["dynamic"][pattern])}
    size = group_of(said.get("group_size"))
    return integers(said["bits"], is_symmetric=said.get("sym", True), size=size, scale_dtype="float16")


def _leaves(config: Config, module: str) -> bool:
    return (_entry(config, module) or "").startswith("-:")


METHOD = Method(formats=_formats, scheme=_scheme, leaves=_leaves)
