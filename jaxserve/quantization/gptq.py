"""Matrices as GPTQ's packages write them: words along the inputs, [inputs / 8, outputs], and a group for each input.

Version 1 of the format (`checkpoint_format` "gptq") stores zero points less 1, version 2 ("gptq_v2") as they are. Where
codes are symmetric, the zero point is the middle whatever the file says: labels of versions are not to be trusted.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.quantization.scheme import CodeName, Scheme
from jaxserve.quantization.stored import Codes, Header, scheme_of_groups, unpack

_REQUIRED = ("qweight", "qzeros", "scales", "g_idx")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTQ:
    """Unsigned integers of 2, 4 or 8 bits with zero points."""

    bits: int
    is_symmetric: bool
    is_version_2: bool

    def parts(self, leaves: Mapping[str, Header]) -> tuple[str, ...] | None:
        """Return the names of codes, zero points, scales and groups."""
        return tuple(name for name in _REQUIRED if name in leaves) if "qweight" in leaves else None

    def shape(self, module: str, headers: Mapping[str, Header]) -> tuple[int, int]:
        """Return the shape that the words have room for."""
        if missing := [name for name in _REQUIRED if name not in headers]:
            raise CheckpointError(f"{module}: tensors missing beside qweight: {', '.join(missing)}")
        (dtype, words), scales = headers["qweight"], headers["scales"].shape
        per_word = 32 // self.bits
        if dtype != "I32" or len(words) != 2 or len(scales) != 2 or scales[1] != words[1]:
            raise CheckpointError(f"{module}: qweight {dtype} {list(words)} and scales {list(scales)} do not fit")
        inputs, outputs = words[0] * per_word, words[1]
        expected = {"qzeros": (scales[0], -(-outputs // per_word)), "g_idx": (inputs,)}
        for name, shape in expected.items():
            if headers[name].shape != shape:
                raise CheckpointError(f"{module}.{name} is {list(headers[name].shape)} and not {list(shape)}")
        return outputs, inputs

    def scheme(self, headers: Mapping[str, Header]) -> Scheme | None:
        """Return the scheme of integers of 4 bits, or of 8 if they are symmetric."""
        scales = headers["scales"]
        kinds: dict[tuple[int, bool], CodeName] = {(4, True): "int4", (4, False): "uint4", (8, True): "int8"}
        codes = kinds.get((self.bits, self.is_symmetric))
        num_inputs = headers["qweight"].shape[0] * (32 // self.bits)
        if codes is None:
            return None
        return scheme_of_groups(codes, scales, num_inputs, num_groups=scales.shape[0])

    def read(self, module: str, tensors: Mapping[str, np.ndarray]) -> Codes:
        """Return the codes with outputs first, and the zero points that count."""
        scales, groups = tensors["scales"].T, tensors["g_idx"]
        if not ((groups >= 0) & (groups < scales.shape[1])).all():
            raise CheckpointError(f"{module}.g_idx names groups that are not there")
        middle = 2 ** (self.bits - 1)
        words = tensors["qzeros"].view(np.uint32)
        if not (self.is_version_2 or self.is_symmetric):
            # Version 1 subtracts 1 from each zero point of a word by one subtraction, which borrows below 0.
            words = words + np.uint32(sum(1 << shift for shift in range(0, 32, self.bits)))
        stored = unpack(words, self.bits, axis=1)[:, : len(scales)].T
        if self.is_symmetric:
            if not np.isin(stored, (middle - 1, middle)).all():
                raise CheckpointError(f"{module}.qzeros: codes are said to be symmetric, and zero points are not")
            stored = np.full_like(stored, middle)
        return Codes(values=unpack(tensors["qweight"], self.bits, axis=0).T, scales=scales, zeros=stored, groups=groups)
