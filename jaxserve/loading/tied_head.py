"""Decide if a Hugging Face checkpoint has an LM head of its own, whatever its config.json says. No jax.

As in transformers 5, the files decide: a head that equals the embedding is tied to it, one that differs is used, even
if the config says that they are tied.
"""

import contextlib
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxserve.errors import CheckpointError
from jaxserve.loading.json_files import read_object
from jaxserve.loading.multimodal import text_names

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
HEADS = ("lm_head", "embed_out")
"""Names of modules that are LM heads in checkpoints."""
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "embeddings")
"""Last part of the names of embeddings."""
ROWS = 2**12
"""Number of rows compared at a time."""


def has_own_head(directory: pathlib.Path, *, is_wrapped: bool = False) -> bool:
    """Return true if the files hold an LM head that differs from the embedding. `is_wrapped` says that the language
    model is one part of a model.

    False if there is none, or if the files cannot be read: loading reports damaged files.
    """
    with contextlib.suppress(CheckpointError, OSError, SafetensorError), contextlib.ExitStack() as stack:
        files = _file_of_tensors(directory)
        stored = text_names(files) if is_wrapped else {name: name for name in files}
        heads = [name for name in stored if name.partition(".")[0] in HEADS and not name.endswith(".bias")]
        embeddings = [name for name in stored if not {*EMBEDDINGS}.isdisjoint(name.split(".")[-3:-1])]
        if not heads or not embeddings:
            return False
        if len(heads) > 1 or not all(name.endswith(".weight") for name in heads + embeddings):  # one is quantized
            return True
        tensors = []
        for name in (heads[0], embeddings[0]):
            file = stack.enter_context(safe_open(directory / files[stored[name]], framework="numpy"))
            tensors.append(file.get_slice(stored[name]))
        return not _are_equal(*tensors)
    return False


def is_head(name: str) -> bool:
    """Return true if a tensor of this name is the weight of an LM head."""
    return name in [f"{head}.weight" for head in HEADS]


def is_embedding(name: str) -> bool:
    """Return true if a tensor of this name is the embedding of tokens."""
    return name.endswith(".weight") and name.split(".")[-2] in EMBEDDINGS


def _file_of_tensors(directory: pathlib.Path) -> Mapping[str, str]:
    if (directory / SINGLE_FILE).is_file():
        with safe_open(directory / SINGLE_FILE, framework="numpy") as file:
            return dict.fromkeys(file.keys(), SINGLE_FILE)
    weight_map = read_object(directory / INDEX_FILE).get("weight_map")
    return weight_map if isinstance(weight_map, dict) else {}


def _are_equal(one: Any, other: Any) -> bool:
    shape = one.get_shape()
    if shape != other.get_shape() or len(shape) != 2:
        return False
    is_same_type = one.get_dtype() == other.get_dtype()

    def values(tensor: Any, first: int) -> np.ndarray:
        rows = tensor[first : min(first + ROWS, shape[0])]  # slices must not end beyond the tensor
        return rows.view(f"u{rows.dtype.itemsize}") if is_same_type else rows.astype(np.float32)

    return all(np.array_equal(values(one, first), values(other, first)) for first in range(0, shape[0], ROWS))
