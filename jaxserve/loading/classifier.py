"""Checkpoints with a classification head in place of an LM head (`...ForSequenceClassification`). No jax.

The head multiplies the hidden state of a text's last token, so it is no part of a step: whoever has that state does it.
"""

import pathlib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import safetensors
from jaxtyping import Float32

from jaxserve.errors import CheckpointError
from jaxserve.loading.json_files import read_object

HEAD = "score.weight"
"""Name of the head's tensor in every family: there is no bias."""

Activation = Literal["softmax", "sigmoid", "none"]


class ClassificationHead(NamedTuple):
    """What turns the hidden state of a text's last token into probabilities.

    Attributes:
        labels: the names of the classes.
        activation: sigmoid for labels that do not exclude each other and for a single one, none for a regression.
    """

    weight: Float32[np.ndarray, "labels E"]
    labels: tuple[str, ...]
    activation: Activation

    def logits(self, hidden: Float32[np.ndarray, " E"]) -> Float32[np.ndarray, " labels"]:
        """Return a logit for each label."""
        return self.weight @ hidden

    def probs(self, hidden: Float32[np.ndarray, " E"]) -> list[float]:
        """Return the probability of each label or, of a regression, its values."""
        logits = self.logits(hidden).astype(np.float64)
        if self.activation == "softmax":
            powers = np.exp(logits - logits.max())
            return (powers / powers.sum()).tolist()
        return (1 / (1 + np.exp(-logits))).tolist() if self.activation == "sigmoid" else logits.tolist()


def is_classifier(fields: Mapping[str, Any]) -> bool:
    """Return true if a config.json is of a model with a classification head."""
    names = fields.get("architectures")
    return isinstance(names, list) and any(str(name).endswith("ForSequenceClassification") for name in names)


def read_head(path: str | pathlib.Path, *, hidden_size: int) -> ClassificationHead | None:
    """Return the classification head of a model directory, None if it has none. Raises CheckpointError."""
    directory = pathlib.Path(path)
    config = directory / "config.json"
    if not config.is_file() or not is_classifier(fields := read_object(config)):
        return None
    for file in sorted(directory.glob("*.safetensors")):
        with safetensors.safe_open(file, framework="numpy") as tensors:
            if HEAD in tensors.keys():  # noqa: SIM118 (the file is no dict)
                weight = np.asarray(tensors.get_tensor(HEAD)).astype(np.float32)
                break
    else:
        raise CheckpointError(f"{directory} does not fit its config.json; tensors missing: {HEAD}")
    if weight.ndim != 2 or weight.shape[1] != hidden_size:
        raise CheckpointError(f"{directory}: {HEAD} is {list(weight.shape)}, not [labels, {hidden_size}]")
    names = fields.get("id2label")
    known = names if isinstance(names, dict) else {}
    return ClassificationHead(
        weight=weight,
        labels=tuple(str(known.get(str(index), f"LABEL_{index}")) for index in range(len(weight))),
        activation=_activation(fields.get("problem_type"), num_labels=len(weight)),
    )


def _activation(problem_type: Any, *, num_labels: int) -> Activation:
    if problem_type == "regression":
        return "none"
    return "sigmoid" if problem_type == "multi_label_classification" or num_labels == 1 else "softmax"
