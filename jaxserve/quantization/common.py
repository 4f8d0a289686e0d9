"""Find one scheme for matrices that are stored in several, so that the weight that they compose is held as codes.

Nothing is rounded: 4-bit codes become 8-bit codes if necessary, and groups the largest that divide all groups.
"""

import math
from collections.abc import Iterable

import msgspec
import numpy as np
from jaxtyping import Float32, Shaped

from jaxserve.quantization.scheme import CodeName, Parts, Scheme, dtype_of, pack

DIFFERENT_ORDERS = "parts of it have their inputs in different orders (act-order)"
SMALLEST_GROUP = 8
"""Inputs of the smallest group that is worth a scale."""

INTEGERS: tuple[CodeName, ...] = ("int4", "uint4", "int8")


def common_scheme(schemes: Iterable[Scheme], num_inputs: int) -> Scheme | str:
    """Return the scheme that matrices with this number of inputs can be converted to, or why there is none."""
    found = list(dict.fromkeys(schemes))
    if len(found) == 1:
        return found[0]
    if len({scheme.has_order for scheme in found}) > 1:
        return DIFFERENT_ORDERS
    codes = _common_codes({scheme.codes for scheme in found})
    if codes is None:
        return "parts of it are stored as " + " and ".join(sorted({str(scheme) for scheme in found}))
    group = math.gcd(*(scheme.group_size or num_inputs for scheme in found))
    has_zeros = {"int4", "uint4"} == {scheme.codes for scheme in found} or any(scheme.has_zeros for scheme in found)
    # If scales are stored in different types, float32 holds all of them, and their products with factors.
    levels = {(scheme.scale_dtype, scheme.factor_dtype, scheme.factor_size) for scheme in found}
    is_alike = len(levels) == 1 and not (has_zeros and found[0].factor_dtype is not None)
    return Scheme(
        codes=codes,
        group_size=None if group == num_inputs else group,
        scale_dtype=found[0].scale_dtype if is_alike else "float32",
        has_zeros=has_zeros,
        has_minimums=any(scheme.has_minimums for scheme in found),
        factor_dtype=found[0].factor_dtype if is_alike else None,
        factor_size=found[0].factor_size if is_alike else None,
        has_order=found[0].has_order,
    )


def _common_codes(names: set[CodeName]) -> CodeName | None:
    if len(names) == 1:
        return next(iter(names))
    if names == {"int4", "uint4"}:
        return "uint4"
    return "int8" if names <= set(INTEGERS) else None


def regrouped(scheme: Scheme, num_inputs: int) -> Scheme | str:
    """Return the scheme with groups that divide this number of inputs, or why no groups are worth their scales."""
    if scheme.group_size is None or num_inputs % scheme.group_size == 0:
        return scheme
    size = math.gcd(scheme.group_size, num_inputs)
    if size < SMALLEST_GROUP:
        return f"groups of {scheme.group_size} do not divide {num_inputs} inputs, and of {size} are too small"
    return msgspec.structs.replace(scheme, group_size=size)


def converted(parts: Parts, scheme: Scheme, common: Scheme, num_inputs: int) -> Parts:
    """Return the arrays that `common` stores a matrix [outputs, inputs] as, of those that `scheme` does."""
    if scheme == common:
        return parts
    groups = common.num_groups(num_inputs)
    scales, minimums = parts.scales, parts.minimums
    factors, minimum_factors = parts.factors, parts.minimum_factors
    if (scheme.scale_dtype, scheme.factor_dtype) != (common.scale_dtype, common.factor_dtype):
        scales = _factored(scales, factors)
        minimums = None if minimums is None else _factored(minimums, minimum_factors)
        factors = minimum_factors = None
    if common.has_minimums and minimums is None:
        minimums = np.zeros_like(scales)
        minimum_factors = factors
    dtype = dtype_of(common.scale_dtype)
    zeros = parts.zeros
    if common.has_zeros:
        # The nibbles of int4 are 8 more than their values.
        shift = 8 if (scheme.codes, common.codes) == ("int4", "uint4") else 0
        zeros = (np.zeros(scales.shape, np.float32) if zeros is None else zeros.astype(np.float32)) + np.float32(shift)
    return Parts(
        codes=_converted_codes(parts.codes, scheme.codes, common.codes),
        scales=_repeated(scales, groups).astype(dtype),
        zeros=None if zeros is None else _repeated(zeros, groups).astype(dtype),
        minimums=None if minimums is None else _repeated(minimums, groups).astype(dtype),
        factors=factors,
        minimum_factors=minimum_factors,
    )


def _converted_codes(codes: np.ndarray, name: CodeName, common: CodeName) -> np.ndarray:
    if common != "int8" or name == "int8":
        return codes
    return (unpack_pairs(codes).astype(np.int8)) - np.int8(8 if name == "int4" else 0)


def unpack_pairs(codes: Shaped[np.ndarray, "... half"]) -> Shaped[np.ndarray, "... K"]:
    """Return the 4-bit codes of bytes that have two each, the first in the lower half: the inverse of `pack`."""
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def swapped(codes: Shaped[np.ndarray, "... half"]) -> Shaped[np.ndarray, "... half"]:
    """Return bytes with their two codes of 4 bits the other way round."""
    return (codes << 4) | (codes >> 4)


def repack_halves(halves: Shaped[np.ndarray, "... size"]) -> Shaped[np.ndarray, "... size"]:
    """Return pairs of codes in order, from bytes whose lower halves are the first codes and upper halves the last
    ones.
    """
    return pack(np.concatenate([halves & 15, halves >> 4], axis=-1))


def _factored(small: np.ndarray, factors: np.ndarray | None) -> np.ndarray:
    values = small.astype(np.float32)
    return values if factors is None else values * _repeated(factors, values.shape[-1]).astype(np.float32)


def _repeated(entries: np.ndarray, count: int) -> np.ndarray:
    """Return `count` entries per output, each of which is that of the larger group around it."""
    return np.repeat(entries, count // entries.shape[-1], axis=-1)


def values_of(scheme: Scheme, parts: Parts) -> Float32[np.ndarray, "N K"]:
    """Return the values of a matrix [outputs, inputs], as `layers.codes_by_xla.dequantize` computes them on devices."""
    kind, groups = scheme.kind, parts.scales.shape[-1]
    codes = parts.codes if kind.per_byte == 1 else unpack_pairs(parts.codes)
    if kind.values is not None:
        values = np.array(kind.values, np.float32)[codes]
    else:
        values = codes.astype(np.float32) + np.float32(kind.first)
    values = values.reshape(len(values), groups, -1)
    if parts.zeros is not None:
        values -= parts.zeros.astype(np.float32)[..., None]
    values *= _factored(parts.scales, parts.factors)[..., None]
    if parts.minimums is not None:
        values -= _factored(parts.minimums, parts.minimum_factors)[..., None]
    return values.reshape(len(values), -1)
