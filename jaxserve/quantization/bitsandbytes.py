"""Matrices as bitsandbytes writes them: tables of 4-bit codes (NF4, FP4), and 8-bit integers (LLM.int8).

Blocks of 4-bit codes run over the flattened matrix, the first code of a byte in its upper half; scales may be codes
themselves (`nested`). Their sizes are in JSON, the bytes of a tensor.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32, Int8, UInt8

from jaxserve.errors import CheckpointError
from jaxserve.quantization.common import swapped, unpack_pairs
from jaxserve.quantization.method import Config, Method, require
from jaxserve.quantization.scheme import KINDS, CodeName, Parts, Scheme
from jaxserve.quantization.stored import Format, Header

STATE = "weight.quant_state.bitsandbytes__"
"""The prefix of the JSON's leaf; the kind of codes follows."""
_SIZES = {"U8": 1, "I8": 1, "BF16": 2, "F16": 2, "F32": 4}
"""Bytes of the types that codes are stored in, which may be any of them."""
_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
_SMALLEST_GROUP = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class _State:
    """The contents of the JSON."""

    codes: CodeName
    block: int
    shape: tuple[int, int]
    dtype: str
    """Dtype of the values, as bitsandbytes returns them."""
    nested_block: int
    """Number of scales with a common scale; 0 if scales are not codes."""
    offset: float
    """Added to scales that are codes."""

    @property
    def num_blocks(self) -> int:
        """Number of scales."""
        return -(-self.shape[0] * self.shape[1] // self.block)


@dataclasses.dataclass(frozen=True)
class FourBits:
    """NF4 and FP4, with nested scales or not."""

    def parts(self, leaves: Mapping[str, Header]) -> tuple[str, ...] | None:
        """Return the names of codes, scales, tables and the JSON."""
        if not any(name.startswith(STATE) for name in leaves):
            return None
        return tuple(name for name in leaves if name == "weight" or name.startswith("weight."))

    def shape(self, module: str, headers: Mapping[str, Header]) -> tuple[int, int]:
        """Return the shape that the JSON states; it must match the number of codes."""
        state = _state(module, headers)
        blocks = state.num_blocks
        expected = {"weight.quant_map": Header("F32", (16,)), "weight.absmax": Header("F32", (blocks,))}
        if state.nested_block:
            expected["weight.absmax"] = Header("U8", (blocks,))
            expected["weight.nested_absmax"] = Header("F32", (-(-blocks // state.nested_block),))
            expected["weight.nested_quant_map"] = Header("F32", (256,))
        names = {"weight", STATE + state.codes, *expected}
        if headers.keys() != names:
            raise CheckpointError(
                f"{module}: its tensors must be {', '.join(sorted(names))}, and are {', '.join(sorted(headers))}"
            )
        for name, header in expected.items():
            if headers[name][:2] != header[:2]:
                found = headers[name]
                raise CheckpointError(
                    f"{module}.{name} is {found.dtype} {list(found.shape)} and not {header.dtype} {list(header.shape)}"
                )
        codes = headers["weight"]
        num_bytes = math.prod(codes.shape) * _SIZES.get(codes.dtype, 0)
        if num_bytes != -(-math.prod(state.shape) // 2):
            raise CheckpointError(
                f"{module}.weight: {codes.dtype} {list(codes.shape)} are no pairs of codes of {list(state.shape)}"
            )
        return state.shape

    def scheme(self, module: str, headers: Mapping[str, Header]) -> Scheme | str:
        """Return the scheme of the codes, in groups of a row that are within a block."""
        state = _state(module, headers)
        num_inputs = state.shape[1]
        size = math.gcd(state.block, num_inputs)
        if size < _SMALLEST_GROUP:
            return f"blocks of {state.block} of the flattened matrix are no groups of {num_inputs} inputs"
        return Scheme(codes=state.codes, group_size=None if size == num_inputs else size)

    def read(self, module: str, tensors: Mapping[str, np.ndarray]) -> "Blocks":
        """Return codes and scales. Raises CheckpointError if the table is not one of bitsandbytes'."""
        headers = {name: Header("", tensor.shape, tensor.view) for name, tensor in tensors.items()}
        state = _state(module, {name: header for name, header in headers.items() if name.startswith(STATE)})
        table = np.array(KINDS[state.codes].values, np.float32)
        if not np.allclose(tensors["weight.quant_map"], table, rtol=0, atol=1e-6):
            raise CheckpointError(f"{module}.weight.quant_map has other values than those of {state.codes}")
        scales = tensors["weight.absmax"]
        if state.nested_block:
            which = np.arange(len(scales)) // state.nested_block
            products = tensors["weight.nested_quant_map"][scales] * tensors["weight.nested_absmax"][which]
            scales = products + np.float32(state.offset)
        codes = np.ascontiguousarray(tensors["weight"]).reshape(-1).view(np.uint8)
        return Blocks(codes=codes, scales=scales, state=state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """A flattened matrix in blocks, read from a checkpoint."""

    codes: UInt8[np.ndarray, " bytes"]
    scales: Float32[np.ndarray, " blocks"]
    state: _State

    def dequantize(self) -> Float[np.ndarray, "N K"]:
        """Return the values, rounded from float32 to the type that the model had."""
        return self.values_in_float32().astype(_DTYPES[self.state.dtype])

    def values_in_float32(self) -> Float32[np.ndarray, "N K"]:
        """Return the values as they are before that."""
        num_values = math.prod(self.state.shape)
        table = np.array(KINDS[self.state.codes].values, np.float32)
        values = table[unpack_pairs(swapped(self.codes))][:num_values]
        products = values * np.repeat(self.scales, self.state.block)[:num_values]
        return products.reshape(self.state.shape)

    def parts(self, scheme: Scheme) -> Parts:
        """Return the codes with the first of a byte in its lower half, and the scale of each group's block."""
        outputs, inputs = self.state.shape
        size = scheme.group_size or inputs
        first_values = np.arange(outputs * inputs // size) * size
        scales = self.scales[first_values // self.state.block].reshape(outputs, -1)
        return Parts(swapped(self.codes).reshape(outputs, -1), scales)


def _state(module: str, headers: Mapping[str, Header]) -> _State:
    """Return the contents of the JSON. Raises CheckpointError if they are not consistent."""
    [name, *others] = [name for name in headers if name.startswith(STATE)]
    kind: Any = name.removeprefix(STATE)
    try:
        if others:
            raise ValueError("there are several")
        found = json.loads(headers[name].content)
        nested = "nested_blocksize" in found
        state = _State(
            codes=kind,
            block=found["blocksize"],
            shape=tuple(found["shape"]),
            dtype=found["dtype"],
            nested_block=found["nested_blocksize"] if nested else 0,
            offset=float(found["nested_offset"]) if nested else 0.0,
        )
        sizes = (state.block, *state.shape, *((state.nested_block,) if nested else ()))
        if kind not in ("nf4", "fp4") or found["quant_type"] != kind or state.dtype not in _DTYPES:
            raise ValueError(f"{found!r:.200} of {kind!r:.20}")
        if len(state.shape) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ValueError(f"sizes are {sizes}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{module}.{name} cannot be read: {error}") from error
    return state


@dataclasses.dataclass(frozen=True)
class EightBits:
    """Integers with a largest magnitude for each output, which is encoded as 127."""

    def parts(self, leaves: Mapping[str, Header]) -> tuple[str, ...] | None:
        """Return the names of codes, magnitudes and the order of codes."""
        if "SCB" not in leaves or "weight" not in leaves or leaves["weight"].dtype != "I8":
            return None
        return tuple(name for name in ("weight", "SCB", "weight_format") if name in leaves)

    def shape(self, module: str, headers: Mapping[str, Header]) -> tuple[int, int]:
        """Return the shape of the codes."""
        codes, magnitudes = headers["weight"].shape, headers["SCB"]
        if len(codes) != 2 or magnitudes[:2] != ("F32", codes[:1]):
            raise CheckpointError(
                f"{module}: codes of {list(codes)} and SCB {magnitudes.dtype} {list(magnitudes.shape)} do not fit"
            )
        return codes[0], codes[1]

    def scheme(self, module: str, headers: Mapping[str, Header]) -> Scheme | str:  # noqa: ARG002 (there is one)
        """Return the scheme of integers with a scale an output."""
        return Scheme(codes="int8")

    def read(self, module: str, tensors: Mapping[str, np.ndarray]) -> "Magnitudes":
        """Return codes and magnitudes. Raises CheckpointError for codes in an order of some GPU's."""
        if "weight_format" in tensors and tensors["weight_format"].any():
            raise CheckpointError(f"{module}.weight_format is {tensors['weight_format']}, only 0 (rows) is supported")
        return Magnitudes(codes=tensors["weight"], largest=tensors["SCB"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Magnitudes:
    """A matrix of integers, read from a checkpoint."""

    codes: Int8[np.ndarray, "N K"]
    largest: Float32[np.ndarray, " N"]

    def dequantize(self) -> Float32[np.ndarray, "N K"]:
        """Return the values, rounded twice as bitsandbytes does."""
        return self.codes.astype(np.float32) * self.largest[:, None] * np.float32(1 / 127)

    values_in_float32 = dequantize

    def parts(self, scheme: Scheme) -> Parts:  # noqa: ARG002 (there is one)
        """Return the codes as they are, with scales."""
        return Parts(self.codes, (self.largest * np.float32(1 / 127))[:, None])


def _formats(config: Config, where: str) -> tuple[Format, ...]:
    four, eight = (bool(config.get(name, config.get(f"_{name}"))) for name in ("load_in_4bit", "load_in_8bit"))
    if four == eight:
        raise CheckpointError(f"{where}: one of load_in_4bit and load_in_8bit must be true")
    if four:
        require(config, where, bnb_4bit_quant_type=(None, "nf4", "fp4"))
        return (FourBits(),)
    return (EightBits(),)


def _scheme(config: Config, module: str) -> Scheme:  # noqa: ARG001 (all are alike)
    if config.get("load_in_8bit") or config.get("_load_in_8bit"):
        return Scheme(codes="int8")
    return Scheme(codes=config.get("bnb_4bit_quant_type") or "fp4", group_size=64)


METHOD = Method(formats=_formats, scheme=_scheme)
