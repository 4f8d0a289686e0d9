"""Pipeline stages: which devices of a mesh, which layers and which other weights each of them has."""

import dataclasses
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxserve.errors import ConfigError

PIPE = "pipe"
"""The mesh axis along which the stages are. No array is split over it."""

OF_FIRST = frozenset({"embed", "embed_norm", "positions", "project_in"})
OF_LAST = frozenset({"lm_head", "lm_head_bias", "project_out"})
"""Names of weights besides the layers that only the first stage needs, or only the last one. A tied embedding is needed
by both, and weights of other names are on all.
"""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One of the stages of a model; by default the only one."""

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """True if the stage begins with token ids."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True if the stage ends with logits, from which it draws."""
        return self.index == self.count - 1

    def span(self, num_layers: int) -> range:
        """Return its layers. If they do not divide, earlier stages have one more: the last one also has the head."""
        first, end = (-(-num_layers * index // self.count) for index in (self.index, self.index + 1))
        return range(first, end)

    def own(self, tree: dict[str, Any], *, is_tied: bool) -> dict[str, Any]:
        """Return the stage's part of a model's weights, with None for layers of other stages."""
        if self.count == 1:
            return tree
        span = self.span(len(tree["layers"]))
        others = set[str]() if self.is_first else OF_FIRST - ({"embed"} if is_tied and self.is_last else set())
        others = others if self.is_last else others | OF_LAST
        own = {name: part for name, part in tree.items() if name not in others}
        return own | {"layers": [part if i in span else None for i, part in enumerate(tree["layers"])]}


def num_stages(mesh: Mesh | AbstractMesh) -> int:
    """Return the number of stages on a mesh."""
    return mesh.shape.get(PIPE, 1)


def check_stages(count: int, *, num_layers: int) -> None:
    """Raise ConfigError for more stages than a model has layers."""
    if count > num_layers:
        raise ConfigError(
            f"pipeline_parallel_size is {count}, but this model has {num_layers} layers, of which each stage needs one"
        )


def stage_meshes(mesh: Mesh | AbstractMesh) -> list[Mesh | AbstractMesh]:
    """Return the mesh of each stage: the devices at its index along "pipe", with the other axes."""
    if PIPE not in mesh.axis_names:
        return [mesh]
    shape = {name: size for name, size in mesh.shape.items() if name != PIPE} or {"tensor": 1}
    names, sizes = tuple(shape), tuple(shape.values())
    explicit = (AxisType.Explicit,) * len(names)
    if isinstance(mesh, AbstractMesh):
        part = AbstractMesh(sizes, names, axis_types=explicit, abstract_device=mesh.abstract_device)
        return [part] * num_stages(mesh)
    by_stage = np.moveaxis(mesh.devices, mesh.axis_names.index(PIPE), 0)
    parts = np.split(by_stage, num_stages(mesh))
    return [Mesh(devices.reshape(sizes), names, axis_types=explicit) for devices in parts]


def stage_of(path: Any, num_layers: int, num_stages: int) -> int:
    """Return the stage onto whose devices a weight is loaded, by its path in the tree of a model with `num_layers`
    layers.
    """
    if path[0].key != "layers":
        return 0 if path[0].key in OF_FIRST else num_stages - 1
    return next(index for index in range(num_stages) if path[1].idx in Stage(index, num_stages).span(num_layers))
