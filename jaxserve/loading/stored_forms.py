"""Other forms in which checkpoints have the tensors that a model declares.

For some families one tensor has all experts of a layer, `experts.gate_up_proj` [X, 2F, E] and `experts.down_proj`
[X, E, F], or with inputs before outputs, and in other checkpoints each expert has its own, such as
`experts.3.gate_proj.weight`. Those of all may be in FP8, with `experts.gate_up_proj_scale_inv` beside them.
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.quantization.plain import TYPES, Plain
from jaxserve.quantization.stored import Format, Header, StoredMatrix

PARTS = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", None)}
"""For each matrix of an expert, the tensor of all experts, and which half of its outputs; None: all of them."""

SCALES = {"_scale_inv": "weight_scale_inv", "_weight_scale": "weight_scale"}
"""Ends of the names of scales beside a tensor of all experts, and what those of one matrix are called."""
UNUSED = ("_activation_scale", "_input_scale")
"""Ends of the names of scales of activations, which stay in 16 bits here."""

RENAMED = {"post_attention_layernorm": "feedforward_layer_norm"}
"""Modules that transformers 5 saves under another name, in layers of OLMo Hybrid that attend."""

_NAME = re.compile(r"(.*\.experts)\.(\d{1,9})\.(gate_proj|up_proj|down_proj)\.weight")


@dataclasses.dataclass(frozen=True)
class ExpertPart:
    """The matrix of one expert in a stored tensor of all."""

    stored: Any
    expert: int
    half: int | None
    is_transposed: bool
    """The stored tensor has inputs before outputs."""

    def read(self) -> np.ndarray:
        """Return the values, reading nothing else of the file."""
        num_outputs = self.header().shape[0]
        start = (self.half or 0) * num_outputs
        rows = slice(start, start + num_outputs)
        if self.is_transposed:
            return self.stored.read_part((self.expert, slice(None), rows)).T
        return self.stored.read_part((self.expert, rows))

    def header(self) -> Header:
        """Return the header of the matrix."""
        dtype, (_, *shape), _ = self.stored.header()
        outputs, inputs = reversed(shape) if self.is_transposed else shape
        return Header(dtype, (outputs if self.half is None else outputs // 2, inputs), self.read)

    def complaint(self, shape: tuple[int, ...]) -> str | None:
        """Return why the stored tensor does not have matrices of such a shape, or None if it does."""
        num_outputs, num_inputs = shape
        matrix = num_outputs * (1 if self.half is None else 2), num_inputs
        num_experts = self.stored.header().shape[0]
        return self.stored.complaint((num_experts, *(matrix[::-1] if self.is_transposed else matrix)))


@dataclasses.dataclass(frozen=True)
class _ScalesPart:
    """The scales of one expert's matrix beside a tensor of all experts: of its blocks, or one for gate and up."""

    stored: Any
    expert: int
    half: int | None
    is_transposed: bool

    def read(self) -> np.ndarray:
        """Return the scales of the blocks of the matrix, or one for all of it."""
        if not self._is_of_one_expert:
            return self.stored.read().reshape(())
        scales = np.asarray(self.stored.read_part((self.expert,)))
        scales = scales.T if self.is_transposed else scales
        return np.split(scales, 2)[self.half] if self.half is not None and self._has_halves else scales

    def header(self) -> Header:
        """Return the header of the scales."""
        shape = list(self._shape) if self._is_of_one_expert else []
        if self.half is not None and self._has_halves:
            shape[0] //= 2
        return Header(self.stored.header().dtype, tuple(shape), self.read)

    @property
    def _is_of_one_expert(self) -> bool:
        return math.prod(self.stored.header().shape) > 1

    @property
    def _shape(self) -> tuple[int, ...]:
        _, *shape = self.stored.header().shape
        return tuple(reversed(shape)) if self.is_transposed else tuple(shape)

    @property
    def _has_halves(self) -> bool:
        return self._is_of_one_expert and self._shape != () and self._shape[0] % 2 == 0


CUT = tuple(f"linear_attn.{part}_conv1d.weight" for part in "qkv")
"""Tensors that transformers 5 saves as equal parts of what they are together, whatever the size of each."""


@dataclasses.dataclass(frozen=True)
class CutPart:
    """A tensor whose rows are in several stored ones, one after the other."""

    stored: tuple[Any, ...]
    start: int
    stop: int
    total: int

    def read(self) -> np.ndarray:
        """Return the values."""
        return np.concatenate([each.read() for each in self.stored])[self.start : self.stop]

    def complaint(self, shape: tuple[int, ...]) -> str | None:
        """Return why the stored tensors do not have such rows, or None if they do."""
        counts = [next(iter(each.header().shape), 0) for each in self.stored]
        if sum(counts) != self.total:
            return f"and those beside it have {sum(counts)} rows, not {self.total}"
        complaints = (each.complaint((count, *shape[1:])) for each, count in zip(self.stored, counts, strict=True))
        return next((each for each in complaints if each is not None), None)


def in_declared_form(
    tensors: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]], formats: Iterable[Format] = ()
) -> dict[str, Any]:
    """Return the tensors by the names that are expected: with the matrices of experts in place of tensors of all of
    them, which may be in one of the formats, and renamed ones under their own name.
    """
    found, used = dict(tensors), set[str]()
    plain = next((each for each in formats if isinstance(each, Plain)), None)
    num_experts = collections.Counter(
        match.group(1, 3) for match in map(_NAME.fullmatch, expected) if match is not None
    )
    for name in expected.keys() - tensors.keys():
        if (match := _NAME.fullmatch(name)) is not None:
            module, half = PARTS[match[3]]
            if (whole := f"{match[1]}.{module}") in tensors:
                _check_experts(tensors[whole], num_experts[match.group(1, 3)])
                part = int(match[2]), half, _is_transposed(match[1], tensors, expected[name], half)
                found[name] = ExpertPart(tensors[whole], *part)
                used.add(whole)
                if plain is not None and tensors[whole].header().dtype in TYPES:
                    scales = {f"{whole}{end}": leaf for end, leaf in SCALES.items() if f"{whole}{end}" in tensors}
                    for each in scales:
                        _check_experts(tensors[each], num_experts[match.group(1, 3)], is_scale=True)
                    leaves = {leaf: _ScalesPart(tensors[each], *part) for each, leaf in scales.items()}
                    found[name] = StoredMatrix(name.removesuffix(".weight"), plain, {"weight": found[name]} | leaves)
                    used |= {*scales, *(f"{whole}{end}" for end in UNUSED)}
            continue
        for own, other in RENAMED.items():
            if own in name and (stored := name.replace(own, other)) in tensors:
                found[name] = tensors[stored]
                used.add(stored)
    for name in expected:
        if name.endswith(CUT[0]):
            found |= _cut_parts([name.removesuffix(CUT[0]) + part for part in CUT], tensors, expected)
    return {name: tensor for name, tensor in found.items() if name not in used}


def _check_experts(stored: Any, num_experts: int, *, is_scale: bool = False) -> None:
    """Raise CheckpointError for a tensor of other experts than those of the model; one scale may be for all."""
    shape = [*stored.header().shape]
    if shape[:1] != [num_experts] and not (is_scale and math.prod(shape) == 1):
        raise CheckpointError(f"{stored.name} has the shape {shape}: its first axis must be {num_experts} experts")


def _is_transposed(module: str, tensors: Mapping[str, Any], shape: tuple[int, ...], half: int | None) -> bool:
    """Return true if the tensors of all experts have inputs before outputs, of which one of the two may be square.

    `shape` is that of a matrix of gates, of which `half` says that it is one, or of one behind them.
    """
    size, width = shape if half is not None else shape[::-1]
    outputs_first = {"gate_up_proj": (2 * size, width), "down_proj": (width, size)}
    stored = {name: tensors.get(f"{module}.{name}") for name in outputs_first}
    found = {name: each.header().shape[1:] for name, each in stored.items() if each is not None}
    return found != {name: outputs_first[name] for name in found} and found == {
        name: outputs_first[name][::-1] for name in found
    }


def _cut_parts(
    names: list[str], tensors: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]]
) -> dict[str, CutPart]:
    """Return the tensors of these names if they are stored, and some with another number of rows than is expected."""
    if not all(name in tensors for name in names):
        return {}
    stored = tuple(tensors[name] for name in names)
    if all(each.complaint(expected[name]) is None for name, each in zip(names, stored, strict=True)):
        return {}
    ends = [0, *itertools.accumulate(expected[name][0] for name in names)]
    return {
        name: CutPart(stored, *between, ends[-1]) for name, between in zip(names, itertools.pairwise(ends), strict=True)
    }
