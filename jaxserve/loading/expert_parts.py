"""Checkpoints that store all experts of a layer in one tensor, where a model declares one for each expert.

transformers 5 writes `experts.gate_up_proj` [X, 2F, E] and `experts.down_proj` [X, E, F] for some families whose
quantized checkpoints have `experts.3.gate_proj.weight` and so on.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

PARTS = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", None)}
"""For each matrix of an expert, the tensor of all experts, and which half of its outputs; None: all of them."""

_NAME = re.compile(r"(.*\.experts)\.(\d{1,9})\.(gate_proj|up_proj|down_proj)\.weight")


@dataclasses.dataclass(frozen=True)
class ExpertPart:
    """The matrix of one expert in a stored tensor of all."""

    stored: Any
    expert: int
    half: int | None

    def read(self) -> np.ndarray:
        """Return the values, reading nothing else of the file."""
        num_outputs = self.stored.header().get_shape()[1]
        start, stop = 0, num_outputs
        if self.half is not None:
            start, stop = self.half * num_outputs // 2, (self.half + 1) * num_outputs // 2
        return self.stored.header()[self.expert, start:stop]

    def complaint(self, shape: tuple[int, ...]) -> str | None:
        """Return why the stored tensor does not have matrices of such a shape, or None if it does."""
        num_outputs, num_inputs = shape
        num_experts = next(iter(self.stored.header().get_shape()), 0)
        if self.expert >= num_experts:
            return f"is not among the {num_experts} experts of {self.stored.name}"
        return self.stored.complaint((num_experts, num_outputs * (1 if self.half is None else 2), num_inputs))


def with_expert_parts(tensors: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the tensors, with the matrices of experts in place of tensors of all of them."""
    found, used = dict(tensors), set[str]()
    for name in expected.keys() - tensors.keys():
        if (match := _NAME.fullmatch(name)) is None:
            continue
        module, half = PARTS[match[3]]
        if (whole := f"{match[1]}.{module}") in tensors:
            found[name] = ExpertPart(tensors[whole], int(match[2]), half)
            used.add(whole)
    return {name: tensor for name, tensor in found.items() if name not in used}
