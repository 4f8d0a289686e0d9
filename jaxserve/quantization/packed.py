"""Matrices of 4- and 8-bit integers in 32-bit words as compressed-tensors writes them: pack-quantized.

Codes are packed along the inputs of an output, the first in the lowest bits, with 8 or 128 added; the last word of an
output may have room left. Zero points are packed in the same way along the outputs.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.quantization.scheme import Scheme
from jaxserve.quantization.stored import UNUSED, Codes, Header, scheme_of_integers, unpack

_REQUIRED = ("weight_packed", "weight_scale", "weight_shape")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """Integers of `bits` bits."""

    bits: int

    def parts(self, leaves: Mapping[str, Header]) -> tuple[str, ...] | None:
        """Return the names of codes, scales, shape, zero points and the order of groups."""
        if "weight_packed" not in leaves or leaves["weight_packed"].dtype != "I32":
            return None
        return tuple(name for name in (*_REQUIRED, "weight_zero_point", "weight_g_idx", *UNUSED) if name in leaves)

    def shape(self, module: str, headers: Mapping[str, Header]) -> tuple[int, int]:
        """Return the stored shape, which the words and the scales have to fit."""
        if missing := [name for name in _REQUIRED if name not in headers]:
            raise CheckpointError(f"{module}: tensors missing beside weight_packed: {', '.join(missing)}")
        words, scales = headers["weight_packed"].shape, headers["weight_scale"]
        if len(words) != 2 or len(scales.shape) != 2 or scales.shape[0] != words[0]:
            raise CheckpointError(
                f"{module}: weight_packed {list(words)} and weight_scale {list(scales.shape)} do not fit"
            )
        outputs, inputs, groups = words[0], self._num_inputs(headers), scales.shape[1]
        described = _described(headers)
        if described != (outputs, inputs):
            raise CheckpointError(f"{module}.weight_shape {list(described)} is not {[outputs, inputs]}")
        if not groups or inputs % groups:
            raise CheckpointError(f"{module}: {inputs} inputs are not in {groups} equal groups")
        expected = {"weight_zero_point": (-(-outputs // (32 // self.bits)), groups), "weight_g_idx": (inputs,)}
        for name, shape in expected.items():
            if name in headers and headers[name].shape != shape:
                raise CheckpointError(f"{module}.{name} is {list(headers[name].shape)} and not {list(shape)}")
        return outputs, inputs

    def scheme(self, module: str, headers: Mapping[str, Header]) -> Scheme | str:  # noqa: ARG002 (all are alike)
        """Return the scheme of the integers, those of 2 bits in 4."""
        scales = headers["weight_scale"]
        return scheme_of_integers(
            self.bits,
            has_zeros="weight_zero_point" in headers,
            scales=scales,
            num_inputs=self._num_inputs(headers),
            num_groups=scales.shape[1],
        )

    def read(self, module: str, tensors: Mapping[str, np.ndarray]) -> Codes:
        """Return the codes less their offset."""
        offset = 2 ** (self.bits - 1)
        num_inputs = int(tensors["weight_shape"][1])
        values = _signed(unpack(tensors["weight_packed"], self.bits, axis=1)[:, :num_inputs], offset)
        zeros, groups = tensors.get("weight_zero_point"), tensors.get("weight_g_idx")
        if zeros is not None:
            zeros = _signed(unpack(zeros, self.bits, axis=0)[: len(values)], offset)
        num_groups = tensors["weight_scale"].shape[1]
        if groups is not None and (groups < 0).all():  # as it is initialised where the order is that of the inputs
            groups = None
        if groups is not None and not ((groups >= 0) & (groups < num_groups)).all():
            raise CheckpointError(f"{module}.weight_g_idx names groups that are not there")
        return Codes(values=values, scales=tensors["weight_scale"], zeros=zeros, groups=groups)

    def _num_inputs(self, headers: Mapping[str, Header]) -> int:
        """Return the stored number of inputs if the last words have room for them, else the number that fills them."""
        most, described = headers["weight_packed"].shape[1] * (32 // self.bits), _described(headers)
        return described[1] if len(described) == 2 and 0 <= most - described[1] < 32 // self.bits else most


def _described(headers: Mapping[str, Header]) -> tuple[int, ...]:
    """Return the shape that the checkpoint states, in integers of 64 or of 32 bits."""
    stated = headers["weight_shape"]
    return tuple(np.frombuffer(stated.content, np.int32 if stated.dtype == "I32" else np.int64).tolist())


def _signed(codes: np.ndarray, offset: int) -> np.ndarray:
    return (codes.astype(np.int16) - offset).astype(np.int8)
