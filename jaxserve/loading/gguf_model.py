"""Weights of GGUF files: the tensors that the weights of a family are made of, checked and then read to the devices."""

import dataclasses
import functools
import pathlib

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.errors import CheckpointError
from jaxserve.layers.params import Params, ParamSpec, layouts
from jaxserve.loading.gguf import GGUFFile
from jaxserve.loading.gguf_rope import ROPE_TENSORS
from jaxserve.loading.gguf_sources import source_of
from jaxserve.loading.huggingface import SourceWeight, describe_tensors, read_to_devices, source_shapes


def load_params(
    path: str | pathlib.Path, specs: Params, *, dtype: np.dtype, mesh: Mesh, progress: bool = True
) -> Params:
    """The weights that `specs` declare, from a GGUF file, cast to `dtype` and laid out over `mesh`.

    Raises CheckpointError, naming all of them, if files are missing, damaged or truncated, or tensors missing,
    unexpected, of another shape or of an unknown type, and ConfigError if a weight does not divide over the mesh; then
    no device memory has been touched.
    """
    layout = layouts(specs, mesh)
    return read_to_devices(open_weights(path, specs), layout, dtype=dtype, progress=progress)


def open_weights(path: str | pathlib.Path, specs: Params) -> Params:
    """A SourceWeight for each of `specs`. Raises CheckpointError as `load_params` does."""
    file = GGUFFile(path)
    stored = as_stored(specs, file)
    expected = source_shapes(stored)
    tensors = {name: tensor for name, tensor in file.tensors.items() if name not in ROPE_TENSORS}
    complaints = {name: tensors[name].complaint(expected[name]) for name in expected.keys() & tensors.keys()}
    problems = file.problems + describe_tensors(
        # Nobody knows which were in a file that is lost.
        missing=[] if file.problems else [name for name in expected if name not in tensors],
        unexpected=[name for name in tensors if name not in expected],
        wrong=[f"{name} {complaint}" for name, complaint in complaints.items() if complaint],
    )
    if problems:
        raise CheckpointError(f"{file.path} does not fit its metadata; " + "; ".join(problems))
    return jax.tree.map(lambda spec: SourceWeight(spec, tensors), stored)


def as_stored(specs: Params, file: GGUFFile) -> Params:
    """`specs` with the names and shapes that the file's tensors have, and transforms that begin with them."""
    return jax.tree.map(functools.partial(_stored_spec, file=file), specs)


def _stored_spec(spec: ParamSpec, *, file: GGUFFile) -> ParamSpec:
    sources = [source_of(file, name, shape) for name, shape in zip(spec.source, spec.source_shapes, strict=True)]
    shapes: dict[str, tuple[int, ...]] = {}
    for source in sources:
        for name, shape in source.shapes.items():
            shapes[name] = max(shape, shapes.get(name, ()))  # a stack is as high as its last part says

    def transform(*tensors: np.ndarray) -> np.ndarray:
        stored = dict(zip(shapes, tensors, strict=True))
        made = [source.make(*(stored[name] for name in source.shapes)) for source in sources]
        return made[0] if spec.transform is None else spec.transform(*made)

    return dataclasses.replace(spec, source=tuple(shapes), source_shapes=tuple(shapes.values()), transform=transform)
