"""Weights of GGUF files: the tensors that the weights of a family are made of, checked and then read to the devices."""

import dataclasses
import logging
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, override

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.errors import CheckpointError
from jaxserve.layers.layouts import layouts
from jaxserve.layers.params import Params, ParamSpec
from jaxserve.loading.gguf import GGUFFile, GGUFTensor
from jaxserve.loading.gguf_keys import non_negative_integer, num_layers, positive_integer
from jaxserve.loading.gguf_rope import ROPE_TENSORS
from jaxserve.loading.gguf_sources import Source, source_of
from jaxserve.loading.huggingface import SourceWeight, describe_tensors, read_to_devices
from jaxserve.quantization.common import converted
from jaxserve.quantization.scheme import Parts, Scheme

logger = logging.getLogger(__name__)


def load_params(
    path: str | pathlib.Path, specs: Params, *, dtype: np.dtype, mesh: Mesh, progress: bool = True
) -> Params:
    """Return the weights that `specs` declare, from a GGUF file, cast to `dtype` and laid out over `mesh`.

    Raises CheckpointError, naming all of them, if files are missing, damaged or truncated, or tensors missing,
    unexpected, of another shape or of an unknown type, and ConfigError if a weight does not divide over the mesh; then
    no device memory has been touched.
    """
    layout = layouts(specs, mesh)
    return read_to_devices(open_weights(path, specs), layout, dtype=dtype, progress=progress)


def open_weights(path: str | pathlib.Path, specs: Params) -> Params:
    """Return a SourceWeight for each of `specs`. Raises CheckpointError as `load_params` does."""
    file = GGUFFile(path)
    further = tuple(f"blk.{index}." for index in range(num_layers(file), positive_integer(file, "block_count")))
    left_out = [name for name in file.tensors if name.startswith(further)]
    if left_out:
        logger.info("%d tensors of layers that predict further tokens are left out", len(left_out))
    sharing = range(num_layers(file) - non_negative_integer(file, "attention.shared_kv_layers"), num_layers(file))
    unused = {f"blk.{index}.attn_{part}" for index in sharing for part in ("k", "v", "k_norm")}
    unused = [name for name in file.tensors if name.rpartition(".")[0] in unused]
    if unused:
        logger.info("%d tensors of layers that read the keys and values of others are left out", len(unused))
    tensors = {name: file.tensors[name] for name in file.tensors.keys() - {*left_out, *unused, *ROPE_TENSORS}}
    weights = jax.tree.map(lambda spec: GGUFWeight(spec, tensors, _sources(spec, file)), specs)
    expected = {name: shape for weight in jax.tree.leaves(weights) for name, shape in weight.stored_shapes.items()}
    complaints = {name: tensors[name].complaint(expected[name]) for name in expected.keys() & tensors.keys()}
    problems = file.problems + describe_tensors(
        # The names of a lost file's tensors are not known.
        missing=[] if file.problems else [name for name in expected if name not in tensors],
        unexpected=[name for name in tensors if name not in expected],
        wrong=[f"{name} {complaint}" for name, complaint in complaints.items() if complaint],
    )
    if problems:
        raise CheckpointError(f"{file.path} does not fit its metadata; " + "; ".join(problems))
    return weights


@dataclasses.dataclass(frozen=True)
class GGUFWeight(SourceWeight):
    """A weight whose sources are made of the tensors of a GGUF file, some of which hold several sources."""

    tensors: Mapping[str, GGUFTensor]
    sources: tuple[Source, ...]

    @property
    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of the file that the weight is made of, and their shapes."""
        shapes: dict[str, tuple[int, ...]] = {}
        for source in self.sources:
            for name, shape in source.shapes.items():
                shapes[name] = max(shape, shapes.get(name, ()))  # a stack is as high as its last part says
        return shapes

    def read_sources(self, dtype: np.dtype) -> Iterator[np.ndarray]:
        """Read each tensor of the file once, matrices cast to `dtype`, and make the sources of them."""

        def read(name: str) -> np.ndarray:
            tensor = self.tensors[name].read()
            return tensor.astype(dtype, copy=False) if tensor.ndim > 1 else tensor

        stored = {name: read(name) for name in self.stored_shapes}
        return (source.make(*(stored[name] for name in source.shapes)) for source in self.sources)

    @override
    def source_schemes(self) -> list[Scheme | str | None]:
        """Return the scheme of each tensor of the file, or why it has none."""
        tensors = {name: self.tensors[name] for source in self.sources for name in source.shapes}
        schemes: list[Scheme | str | None] = [tensor.scheme() for tensor in tensors.values()]
        if any(source.arrange is None for source in self.sources) and any(schemes):
            return ["its inputs are moved"]
        return schemes

    @override
    def read_source_parts(self, common: Scheme) -> Iterator[Parts]:
        """Read each tensor of the file once, and arrange what its rows have as those of the sources."""
        num_inputs = self.spec.row_size

        def read(name: str) -> Parts:
            tensor = self.tensors[name]
            rows = Parts(*(part if part is None else part.reshape(-1, part.shape[-1]) for part in tensor.read_parts()))
            scheme = tensor.scheme()
            assert isinstance(scheme, Scheme)
            parts = converted(rows, scheme, common, num_inputs)
            return Parts(*(part if part is None else part.reshape(*tensor.shape[:-1], -1) for part in parts))

        stored = {name: read(name) for name in self.stored_shapes}

        def arrange(source: Source, parts: tuple[Any, ...]) -> Any:
            assert source.arrange is not None
            return None if parts[0] is None else source.arrange(*parts)

        for source in self.sources:
            yield Parts(
                *(arrange(source, parts) for parts in zip(*(stored[name] for name in source.shapes), strict=True))
            )


def _sources(spec: ParamSpec, file: GGUFFile) -> tuple[Source, ...]:
    return tuple(source_of(file, name, shape) for name, shape in zip(spec.source, spec.source_shapes, strict=True))
