"""Other forms in which checkpoints have the tensors that a model declares.

For some families one tensor has all experts of a layer, `experts.gate_up_proj` [X, 2F, E] and `experts.down_proj`
[X, E, F], and in quantized checkpoints each expert has its own, such as `experts.3.gate_proj.weight`.
"""

import dataclasses
import itertools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

PARTS = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", None)}
"""For each matrix of an expert, the tensor of all experts, and which half of its outputs; None: all of them."""

INPUTS_FIRST = ".feed_forward.experts"
"""The end of the name of experts, Llama 4's, whose tensors of all have inputs before outputs."""

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
        num_outputs = self.stored.header().get_shape()[2 if self.is_transposed else 1]
        start, stop = 0, num_outputs
        if self.half is not None:
            start, stop = self.half * num_outputs // 2, (self.half + 1) * num_outputs // 2
        if self.is_transposed:
            return self.stored.header()[self.expert, :, start:stop].T
        return self.stored.header()[self.expert, start:stop]

    def complaint(self, shape: tuple[int, ...]) -> str | None:
        """Return why the stored tensor does not have matrices of such a shape, or None if it does."""
        num_outputs, num_inputs = shape
        num_experts = next(iter(self.stored.header().get_shape()), 0)
        if self.expert >= num_experts:
            return f"is not among the {num_experts} experts of {self.stored.name}"
        matrix = num_outputs * (1 if self.half is None else 2), num_inputs
        return self.stored.complaint((num_experts, *(matrix[::-1] if self.is_transposed else matrix)))


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
        counts = [next(iter(each.header().get_shape()), 0) for each in self.stored]
        if sum(counts) != self.total:
            return f"and those beside it have {sum(counts)} rows, not {self.total}"
        complaints = (each.complaint((count, *shape[1:])) for each, count in zip(self.stored, counts, strict=True))
        return next((each for each in complaints if each is not None), None)


def in_declared_form(tensors: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the tensors by the names that are expected: with the matrices of experts in place of tensors of all of
    them, and renamed ones under their own name.
    """
    found, used = dict(tensors), set[str]()
    for name in expected.keys() - tensors.keys():
        if (match := _NAME.fullmatch(name)) is not None:
            module, half = PARTS[match[3]]
            if (whole := f"{match[1]}.{module}") in tensors:
                is_transposed = match[1].endswith(INPUTS_FIRST)
                found[name] = ExpertPart(tensors[whole], int(match[2]), half, is_transposed)
                used.add(whole)
            continue
        for own, other in RENAMED.items():
            if own in name and (stored := name.replace(own, other)) in tensors:
                found[name] = tensors[stored]
                used.add(stored)
    for name in expected:
        if name.endswith(CUT[0]):
            found |= _cut_parts([name.removesuffix(CUT[0]) + part for part in CUT], tensors, expected)
    return {name: tensor for name, tensor in found.items() if name not in used}


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
