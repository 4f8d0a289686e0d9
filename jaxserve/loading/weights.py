"""The config and the weights of a model, whatever they are stored in: a directory or a GGUF file."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxserve.config import Quantization
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.layers.params import Params, rounded_to, with_schemes
from jaxserve.loading import gguf_config, gguf_model, huggingface, orbax_store
from jaxserve.quantization.scheme import SCHEMES


def load_config(path: str | pathlib.Path) -> dict[str, Any]:
    """The fields of config.json, or what a GGUF file has of them. Raises CheckpointError if they cannot be read.

    Where the weights are there too, they decide whether the LM head is tied to the embedding, not the config.
    """
    if pathlib.Path(path).is_file():
        return gguf_config.load_config(path)
    fields = huggingface.load_config(path)
    if orbax_store.is_store(path):
        arrays = orbax_store.read_manifest(path).arrays
        fields["tie_word_embeddings"] = not any(name.partition(".")[0] == "lm_head" for name in arrays)
    return fields


@contextlib.contextmanager
def naming_config(path: str | pathlib.Path) -> Iterator[None]:
    """Around what reads the fields that `load_config` has found: CheckpointErrors about config.json get its path."""
    try:
        yield
    except CheckpointError as error:
        where = f"{path}, as " if pathlib.Path(path).is_file() else f"{pathlib.Path(path)}/"
        raise CheckpointError(f"{where}{error}") from error


def stored_specs(
    path: str | pathlib.Path,
    specs: Params,
    *,
    dtype: np.dtype,
    quantization: Quantization | None,
    dequantizes: bool = True,
) -> Params:
    """Return `specs` with the schemes by which the weights are held in an engine that serves in `dtype`.

    They are those of the store, or with `quantization` those that a checkpoint of floats is rounded to while it loads.
    Unless it `dequantizes`, codes of a quantized checkpoint are held as they are, where that can be.
    Raises ConfigError for a store that is asked to be what it is not.
    """
    schemes = {} if quantization is None else rounded_to(specs, SCHEMES[quantization])
    if not orbax_store.is_store(path):
        if quantization is None and not dequantizes and pathlib.Path(path).is_dir():
            schemes = huggingface.stored_schemes(path, specs)
        return with_schemes(specs, schemes, dtype=dtype)
    stored = orbax_store.read_manifest(path).schemes
    if quantization is not None and stored != schemes:
        raise ConfigError(
            f"quantization is {quantization}, but the store {path} was written "
            f"{'without' if not stored else 'with another'}: convert the original with --quantization {quantization}"
        )
    return with_schemes(specs, stored, dtype=dtype)


def load_weights(
    path: str | pathlib.Path, specs: Params, *, dtype: np.dtype, mesh: Mesh, progress: bool = True
) -> Params:
    """The weights that `specs` declare, cast to `dtype` and laid out over `mesh`.

    `progress` draws a bar of the bytes that have reached the devices. Raises CheckpointError, naming everything that
    is wrong, and ConfigError if a weight does not divide over the mesh; then no device memory has been touched.
    """
    if pathlib.Path(path).is_file():
        return gguf_model.load_params(path, specs, dtype=dtype, mesh=mesh, progress=progress)
    if orbax_store.is_store(path):
        return orbax_store.load_store(path, specs, dtype=dtype, mesh=mesh, progress=progress)
    return huggingface.load_params(path, specs, dtype=dtype, mesh=mesh, progress=progress)


def open_weights(path: str | pathlib.Path, specs: Params) -> contextlib.AbstractContextManager[Params]:
    """The weights that `specs` declare, of which none is read yet: a tree of `huggingface.SourceWeight`.

    Raises CheckpointError as `load_weights` does. A store has no such weights.
    """
    if pathlib.Path(path).is_file():
        return contextlib.nullcontext(gguf_model.open_weights(path, specs))
    return huggingface.open_weights(path, specs)
