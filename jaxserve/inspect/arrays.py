"""Where the arrays of an engine live: the shards of each weight and of the KV cache, and the bytes of each device."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxserve.errors import InvalidRequest
from jaxserve.execution.programs.model import StepModel
from jaxserve.inspect.engine import engine_of
from jaxserve.inspect.picture import COLORS, Drawing, Picture, html_table, size
from jaxserve.local_model import LocalModel
from jaxserve.tables import aligned

_LAYER = re.compile(r"\b(layers|pools)\.(\d+)\b")
_HEADER = ("array", "shape", "dtype", "spec", "a device", "all devices", "copies")

_SMALL, _LARGE = 64, 220
"""Widths of pictures of an array, in a table and alone, in pixels."""

_LABEL = 15
"""Height of a shard that has the numbers of its devices on it, in pixels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayGroup:
    """Arrays of several layers that are laid out alike.

    Attributes:
        name: the place in the tree of weights, with * for the number of the layer.
        count: how many arrays there are.
        shape: the logical shape of one, of all devices together.
        sharding: the mesh, and the mesh axis that splits each axis of the array.
        bytes_per_device: bytes of one of them on each device.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    sharding: NamedSharding
    bytes_per_device: int

    @property
    def spec(self) -> tuple[Any, ...]:
        """The mesh axis that splits each axis of the array, None for one that is whole."""
        return tuple(self.sharding.spec)

    @property
    def num_copies(self) -> int:
        """How many devices have the same values."""
        num_shards = math.prod(
            whole // part for whole, part in zip(self.shape, self.sharding.shard_shape(self.shape), strict=True)
        )
        return self.sharding.mesh.size // num_shards

    def draw(self, *, width: float = _LARGE) -> Picture:
        """Draw which device has which part: the two largest axes of the array, those that are split first."""
        ranked = sorted(range(len(self.shape)), key=lambda axis: (self._is_split(axis), self.shape[axis]))[-2:]
        axes = sorted(ranked) if len(self.shape) > 1 else [0]
        rows, columns = ([1] + [self.shape[axis] for axis in axes])[-2:]
        num_rows = rows // self.sharding.shard_shape(self.shape)[axes[0]] if len(axes) == 2 else 1
        has_labels = width >= _LARGE
        height = max(width * min(1.0, max(0.25, rows / columns)), _LABEL * num_rows * has_labels)
        drawing = Drawing(width + 2, height + 2 + (18 if has_labels else 0))
        shards: dict[tuple[tuple[int, int], ...], list[int]] = collections.defaultdict(list)
        index_of = {device.id: number for number, device in enumerate(_mesh(self.sharding).devices.flat)}
        for device, index in self.sharding.devices_indices_map(self.shape).items():
            shards[tuple(index[axis].indices(self.shape[axis])[:2] for axis in axes)].append(index_of[device.id])
        for (*outer, (left, right)), devices in shards.items():
            [(top, bottom)] = outer or [(0, 1)]
            x, y = left / columns * width, top / rows * height
            extent = (right - left) / columns * width, (bottom - top) / rows * height
            names = _ranges(devices)
            self._fill(drawing, x, y, extent, devices, title=f"on {names}")
            if has_labels and extent[1] >= _LABEL:
                drawing.text(x + extent[0] / 2, y + extent[1] / 2 + 4, names, anchor="middle", fill="#ffffff")
        if has_labels:
            dimensions = " x ".join(f"{self.shape[axis]:,}" for axis in axes)
            drawing.text(1, height + 15, f"{self.name}: {dimensions}")
        return drawing.picture()

    def visualize(self) -> None:
        """Print the same by `jax.debug.visualize_array_sharding`'s drawing; needs the package rich, and 1 or 2 axes."""
        jax.debug.visualize_sharding(self.shape, self.sharding)

    def _is_split(self, axis: int) -> bool:
        return self.sharding.shard_shape(self.shape)[axis] < self.shape[axis]

    @staticmethod
    def _fill(
        drawing: Drawing, x: float, y: float, extent: tuple[float, float], devices: list[int], *, title: str
    ) -> None:
        """Fill a shard's rectangle with a stripe for each device that has it."""
        width, height = extent
        stripe = height / len(devices)
        for number, device in enumerate(sorted(devices)):
            drawing.rect(
                x + 1, y + 1 + number * stripe, width - 1, stripe - (number == len(devices) - 1),
                fill=COLORS[device % len(COLORS)], title=title,
            )  # fmt: skip


class Arrays:
    """A tree of arrays as groups: iterate over it, or look one up by its name.

    Attributes:
        title: what the arrays are.
        groups: those that are laid out alike, in order of the tree.
        mesh: the devices.
    """

    def __init__(self, title: str, groups: list[ArrayGroup], mesh: Mesh):
        self.title = title
        self.groups = groups
        self.mesh = mesh

    @classmethod
    def of(cls, title: str, tree: Any, mesh: Mesh) -> "Arrays":
        """Describe the arrays of a tree, or their shapes with shardings."""
        found: dict[Any, list[Any]] = collections.defaultdict(list)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            name = _LAYER.sub(r"\1.*", jax.tree_util.keystr(path, simple=True, separator="."))
            found[name.removesuffix(".values"), leaf.shape, str(leaf.dtype), leaf.sharding.spec].append(leaf)
        groups = [
            ArrayGroup(
                name=name,
                count=len(leaves),
                shape=shape,
                dtype=dtype,
                sharding=leaves[0].sharding,
                bytes_per_device=math.prod(leaves[0].sharding.shard_shape(shape)) * leaves[0].dtype.itemsize,
            )
            for (name, shape, dtype, _), leaves in found.items()
        ]
        return cls(title, groups, mesh)

    @property
    def bytes_per_device(self) -> int:
        """Bytes that each device holds."""
        return sum(group.count * group.bytes_per_device for group in self.groups)

    @property
    def total_bytes(self) -> int:
        """Bytes on all devices together; copies count."""
        return self.bytes_per_device * self.mesh.size

    def __iter__(self) -> Iterator[ArrayGroup]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, name: str) -> ArrayGroup:
        """Return the first group whose name ends with `name`. Raises KeyError, which lists the names."""
        found = next((group for group in self.groups if f".{group.name}".endswith(f".{name}")), None)
        if found is None:
            raise KeyError(f"{name}: there are {', '.join(group.name for group in self.groups)}")
        return found

    def __repr__(self) -> str:
        return f"{self._summary()}\n{aligned([_HEADER, *map(self._row, self.groups)])}"

    def _repr_html_(self) -> str:
        rows = [[*self._row(group), group.draw(width=_SMALL)] for group in self.groups]
        return html_table((*_HEADER, "who has what"), rows, title=self._summary())

    def _summary(self) -> str:
        axes = ", ".join(f"{name!r} of {count}" for name, count in self.mesh.shape.items())
        return (
            f"{self.title}: {size(self.bytes_per_device)} on each of {self.mesh.size} devices, "
            f"{size(self.total_bytes)} in all; mesh axes: {axes}"
        )

    @staticmethod
    def _row(group: ArrayGroup) -> list[str]:
        of_device = group.count * group.bytes_per_device
        return [
            group.name if group.count == 1 else f"{group.name} ({group.count})",
            " x ".join(map(str, group.shape)),
            group.dtype,
            ", ".join("-" if axis is None else str(axis) for axis in group.spec),
            size(of_device),
            size(of_device * group.sharding.mesh.size),
            str(group.num_copies),
        ]


def weights(llm: LocalModel, *, stage: int = 0) -> Arrays:
    """Return where each weight of a model lives, or of one of its stages."""
    model, of_stage = _model(llm, stage)
    return Arrays.of(f"weights{of_stage}", model.params, _mesh(model.replicated))


def kv_cache(llm: LocalModel, *, stage: int = 0) -> Arrays:
    """Return where the blocks of the KV cache live, or those of one stage, and what else layers keep."""
    model, of_stage = _model(llm, stage)
    cache = model.kv_cache(engine_of(llm).runner.num_blocks)
    return Arrays.of(f"KV cache{of_stage}", cache, _mesh(model.replicated))


def _model(llm: LocalModel, stage: int) -> tuple[StepModel, str]:
    models = engine_of(llm).runner.builder.models
    if not 0 <= stage < len(models):
        raise InvalidRequest(f"stage must be between 0 and {len(models) - 1}, got {stage}", param="stage")
    return models[stage], f" of stage {stage}" if len(models) > 1 else ""


def _mesh(sharding: NamedSharding) -> Mesh:
    assert isinstance(sharding.mesh, Mesh)
    return sharding.mesh


def _ranges(numbers: list[int]) -> str:
    """Format numbers of devices, such as "0-3" or "0,2"."""
    first, *_, last = sorted(numbers) if len(numbers) > 1 else numbers * 2
    if len(numbers) > 2 and last - first == len(numbers) - 1:
        return f"{first}-{last}"
    return ",".join(map(str, sorted(numbers)))
