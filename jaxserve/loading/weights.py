"""The config and the weights of a model, whatever they are stored in: a directory or a GGUF file."""

import collections
import contextlib
import logging
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.layers.layouts import rounded_to, with_schemes
from jaxserve.layers.params import Params, ParamSpec, path_name
from jaxserve.loading import gguf_config, gguf_model, huggingface, orbax_store, overrides, store_manifest
from jaxserve.loading.expected_weights import expected_weights
from jaxserve.quantization.scheme import SCHEMES, Scheme

logger = logging.getLogger(__name__)


def load_config(path: str | pathlib.Path) -> dict[str, Any]:
    """Return the fields of config.json, or those that a GGUF file has. Raises CheckpointError if they cannot be read.

    If the weights are there too, they decide whether the LM head is tied to the embedding, not the config.
    """
    if pathlib.Path(path).is_file():
        return gguf_config.load_config(path)
    fields = huggingface.load_config(path)
    if store_manifest.is_store(path):
        arrays = store_manifest.read_manifest(path).arrays
        fields["tie_word_embeddings"] = not any(name.partition(".")[0] == "lm_head" for name in arrays)
    return fields


@contextlib.contextmanager
def naming_config(path: str | pathlib.Path) -> Iterator[None]:
    """Wrap what reads the fields that `load_config` has found: CheckpointErrors about config.json get its path."""
    try:
        yield
    except CheckpointError as error:
        given, said = overrides.origin(str(path)), str(error)
        if given != str(path):
            said = said.replace("config.json:", "config.json with hf_overrides:", 1)
        where = f"{given}, as " if pathlib.Path(path).is_file() else f"{pathlib.Path(given)}/"
        raise CheckpointError(f"{where}{said}") from error


WhyNotHeld = Callable[[ParamSpec, Scheme], str | None]
"""(a weight, how its codes would be held) -> why an engine holds its values all the same, or None if it does not"""


def stored_specs(
    path: str | pathlib.Path,
    specs: Params,
    *,
    dtype: np.dtype,
    quantization: str | None,
    dequantizes: bool = False,
    why_not_held: WhyNotHeld | None = None,
) -> Params:
    """Return `specs` with the schemes by which an engine that serves in `dtype` holds the weights.

    Codes of a checkpoint or a store are held as they are, unless `dequantizes` is set, or for a checkpoint if there is
    a reason (`why_not_held`): then the values that the codes stand for. With `quantization`, matrices are rounded to
    codes while they are loaded. Raises ConfigError for options that contradict the contents of a store.
    """
    schemes = {} if quantization is None else rounded_to(specs, SCHEMES[quantization])
    if not store_manifest.is_store(path):
        if quantization is None and not dequantizes:
            held = _held_schemes(path, specs, why_not_held or (lambda spec, scheme: None))  # noqa: ARG005
            return with_schemes(specs, held, dtype=dtype)
        return with_schemes(specs, schemes, dtype=dtype)
    stored = store_manifest.read_manifest(path).schemes
    if quantization is not None and stored != schemes:
        raise ConfigError(
            f"quantization is {quantization}, but the store {path} was written "
            f"{'without' if not stored else 'with another'}: convert the original with --quantization {quantization}"
        )
    return specs if dequantizes else with_schemes(specs, stored, dtype=dtype)


def _held_schemes(path: str | pathlib.Path, specs: Params, why_not_held: WhyNotHeld) -> dict[str, Scheme | None]:
    """Return the schemes of the weights whose codes are held, by path in the tree.

    Those whose values are held instead have None, and the log says why: what is held does not change the values.
    """
    if pathlib.Path(path).is_dir() and not huggingface.is_quantized(path):
        return {}
    held: dict[str, Scheme | None] = {}
    reasons: collections.Counter[str] = collections.Counter()
    with _open_described(path, specs) as weights:
        for where, weight in jax.tree_util.tree_leaves_with_path(weights):
            scheme = weight.stored_scheme() if weight.spec.num_inputs else None
            reason = why_not_held(weight.spec, scheme) if isinstance(scheme, Scheme) else scheme
            if isinstance(scheme, Scheme) and reason is None:
                held[path_name(where)] = scheme
            elif reason is not None:
                held[path_name(where)] = None
                reasons[reason] += 1
    for reason, count in reasons.items():
        logger.info("codes of %d matrices are held as floats: %s", count, reason)
    return held


def _open_described(path: str | pathlib.Path, specs: Params) -> contextlib.AbstractContextManager[Params]:
    """Return weights that know their schemes: of a checkpoint, or if only the config is there, as that describes them.

    Weights are not there if they are to be random, or if only sizes are asked for.
    """
    directory = pathlib.Path(path)
    if not directory.is_dir() or any(directory.glob("*.safetensors")):
        return open_weights(path, specs)
    return contextlib.nullcontext(expected_weights(directory, specs))


def load_weights(
    path: str | pathlib.Path, specs: Params, *, dtype: np.dtype, mesh: Mesh, progress: bool = True
) -> Params:
    """Return the weights that `specs` declare, cast to `dtype` and laid out over `mesh`.

    `progress` draws a bar of the bytes that have reached the devices. Raises CheckpointError, naming everything that
    is wrong, and ConfigError if a weight does not divide over the mesh; then no device memory has been touched.
    """
    if pathlib.Path(path).is_file():
        return gguf_model.load_params(path, specs, dtype=dtype, mesh=mesh, progress=progress)
    if store_manifest.is_store(path):
        return orbax_store.load_store(path, specs, dtype=dtype, mesh=mesh, progress=progress)
    return huggingface.load_params(path, specs, dtype=dtype, mesh=mesh, progress=progress)


def open_weights(path: str | pathlib.Path, specs: Params) -> contextlib.AbstractContextManager[Params]:
    """Return the weights that `specs` declare, none of which has been read: a tree of `huggingface.SourceWeight`.

    Raises CheckpointError as `load_weights` does. A store has no such weights.
    """
    if pathlib.Path(path).is_file():
        return contextlib.nullcontext(gguf_model.open_weights(path, specs))
    return huggingface.open_weights(path, specs)
