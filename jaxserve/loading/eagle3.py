"""The config and the tensors' names of EAGLE-3 heads in both published formats: SafeAILab's, and that of vLLM's
`speculators`. No jax.
"""

import contextlib
import pathlib
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxserve.errors import CheckpointError
from jaxserve.loading.json_files import read_object
from jaxserve.loading.pickles import PICKLED_SUFFIXES, why_not_read

KNOWN = frozenset({
    "architectures", "auto_map", "draft_vocab_size", "dtype", "eagle_aux_hidden_state_layer_ids", "embed_requires_grad",
    "has_no_defaults_at_init", "model_type", "norm_before_residual", "quantization_config", "speculators_config",
    "speculators_model_type", "speculators_version", "target_hidden_size", "tie_word_embeddings", "torch_dtype",
    "transformer_layer_config", "transformers_version",
})  # fmt: skip
"""Fields of a `speculators` config that are read, or of no effect on what a head computes."""

REFUSED = ("norm_before_fc", "fc_norm", "norm_output", "parallel_drafting")
"""Fields of heads that compute something else, if they are set."""


def is_head(fields: dict[str, Any]) -> bool:
    """Return true if a config.json says that its model is an EAGLE-3 head, of either format."""
    named = [*(fields.get("architectures") or ()), fields.get("speculators_model_type")]
    return any("eagle3" in str(name).lower() for name in named)


def published_drafts(fields: dict[str, Any]) -> int | None:
    """Return how many tokens a `speculators` config says to draft, by its default method; None if it does not."""
    said = fields.get("speculators_config") or {}
    methods: list[dict[str, Any]] = said.get("proposal_methods") or []
    chosen = [each for each in methods if each.get("proposal_type") == said.get("default_proposal_method")]
    found = (chosen or methods or [{}])[0].get("speculative_tokens")
    return found if isinstance(found, int) else None


def read_head(path: str) -> dict[str, Any]:
    """Return what there is to know of a head before its weights are loaded, in one form for both formats: the Llama
    config of its "layer", "taps", sizes, and which tensors it has. Raises CheckpointError.
    """
    directory = pathlib.Path(path)
    file = directory / "config.json"
    fields = read_object(file)
    layer = fields
    if "speculators_model_type" in fields:
        if fields["speculators_model_type"] != "eagle3":
            raise CheckpointError(f"{file}: speculators_model_type {fields['speculators_model_type']!r} is not eagle3")
        layer = fields.get("transformer_layer_config")
        if not isinstance(layer, dict):
            raise CheckpointError(f"{file}: there is no transformer_layer_config")
        if unknown := sorted(name for name, value in fields.items() if name not in KNOWN and value):
            raise CheckpointError(f"{file}: {', '.join(unknown)} is not supported")
    eagle = fields.get("eagle_config") or {}
    for name in REFUSED:
        if fields.get(name) or layer.get(name) or eagle.get(name):
            raise CheckpointError(f"{file}: {name} is not supported")
    if eagle.get("use_aux_hidden_state", True) is not True:
        raise CheckpointError(f"{file}: use_aux_hidden_state must be true: a head reads three layers of its target")
    if layer.get("model_type", "llama") != "llama":
        raise CheckpointError(
            f"{file}: model_type {layer['model_type']!r} is not supported: the layer must be a llama's"
        )
    if layer.get("num_hidden_layers", 1) != 1:
        raise CheckpointError(f"{file}: num_hidden_layers must be 1, got {layer['num_hidden_layers']}")
    taps = _first(fields, eagle, name="eagle_aux_hidden_state_layer_ids")
    if taps is not None and not (isinstance(taps, list) and all(isinstance(tap, int) for tap in taps)):
        raise CheckpointError(f"{file}: eagle_aux_hidden_state_layer_ids must be a list of layers, got {taps!r}")
    names = _tensor_names(directory)
    is_new = "speculators_model_type" in fields if not names else any(name.startswith("layers.0.") for name in names)
    head: dict[str, Any] = {
        "layer": layer,
        "taps": taps,
        "norm_before_residual": bool(_first(fields, eagle, name="norm_before_residual")),
        "prefix": "layers.0" if is_new else "midlayer",
        "has_embedding": "embed_tokens.weight" in names,
        "has_lm_head": not names or any(name.startswith("lm_head.") for name in names),
    }
    for name in ("draft_vocab_size", "target_hidden_size"):
        value = fields.get(name, layer.get(name))
        if value is not None and not (isinstance(value, int) and value > 0):
            raise CheckpointError(f"{file}: {name} must be a positive integer, got {value!r}")
        head[name] = value
    if not head["has_lm_head"] and head["draft_vocab_size"] not in (None, layer.get("vocab_size")):
        raise CheckpointError(f"{file}: draft_vocab_size is {head['draft_vocab_size']}, but there is no lm_head.weight")
    if "d2t" in names:
        _check_maps(directory, names, vocab_size=layer.get("vocab_size", 0))
    return head


def _first(*tables: dict[str, Any], name: str) -> Any:
    return next((table[name] for table in tables if table.get(name) is not None), None)


def _files(directory: pathlib.Path) -> list[pathlib.Path]:
    files = sorted(directory.glob("*.safetensors"))
    pickled = [path.name for path in directory.iterdir() if path.suffix in PICKLED_SUFFIXES]
    if not files and pickled:
        raise CheckpointError(f"{directory} has pickled weights only ({pickled[0]}), {why_not_read(str(directory))}")
    return files


def _tensor_names(directory: pathlib.Path) -> dict[str, pathlib.Path]:
    """Return the file of each tensor; none if there are no weights. Damaged files are reported when they are loaded."""
    names: dict[str, pathlib.Path] = {}
    for path in _files(directory):
        with contextlib.suppress(SafetensorError, OSError), safe_open(path, framework="numpy") as file:
            names |= dict.fromkeys(file.keys(), path)
    return names


def _check_maps(directory: pathlib.Path, names: dict[str, pathlib.Path], *, vocab_size: int) -> None:
    """Raise CheckpointError unless `d2t` maps each token of the head to another token of its target, those of `t2d`."""

    def read(name: str) -> np.ndarray:
        with safe_open(names[name], framework="numpy") as file:
            return file.get_tensor(name)

    offsets = read("d2t")
    tokens = np.arange(len(offsets)) + offsets
    if offsets.ndim != 1 or offsets.dtype.kind != "i" or len(set(tokens.tolist())) != len(tokens):
        raise CheckpointError(f"{directory}: d2t must map the tokens of the head to different ones")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise CheckpointError(f"{directory}: d2t maps to tokens outside the vocabulary of {vocab_size}")
    if "t2d" in names:
        is_mapped = read("t2d").astype(bool)
        if is_mapped.shape != (vocab_size,) or not np.array_equal(np.flatnonzero(is_mapped), np.sort(tokens)):
            raise CheckpointError(f"{directory}: t2d has other tokens than d2t")
