"""Checkpoints with a classification head in place of an LM head (`...ForSequenceClassification`). No jax.

The head multiplies the hidden state of a text's last token, so it is no part of a step: whoever has that state does it.
"""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import safetensors
from jaxtyping import Float32

from jaxserve.errors import CheckpointError
from jaxserve.loading.json_files import read_config
from jaxserve.loading.reranking import named_activation
from jaxserve.loading.torch_activations import Activation, identity, read_activation, sigmoid, softmax
from jaxserve.quantization.stored import FLOAT_NAMES

HEAD = "score.weight"
"""Name of the head's tensor in every family: there is no bias."""


class ClassificationHead(NamedTuple):
    """What turns the hidden state of a text's last token into probabilities.

    Attributes:
        labels: the names of the classes.
        activation: makes probabilities of logits: sigmoid for labels that do not exclude each other and for a single
            one, identity for a regression.
        score_activation: makes a score of the logit of a pair, for one label.
        has_pairs: true if the two texts of a pair are separated as the tokenizer separates them.
    """

    weight: Float32[np.ndarray, "labels E"]
    labels: tuple[str, ...]
    activation: Activation
    score_activation: Activation = sigmoid
    has_pairs: bool = True

    def logits(self, hidden: Float32[np.ndarray, " E"]) -> Float32[np.ndarray, " labels"]:
        """Return a logit for each label."""
        return self.weight @ hidden

    def probs(self, hidden: Float32[np.ndarray, " E"]) -> list[float]:
        """Return the probability of each label or, of a regression, its values."""
        return self.activation(self.logits(hidden).astype(np.float64)).tolist()


def is_classifier(fields: Mapping[str, Any]) -> bool:
    """Return true if a config.json is of a model with a classification head of its own.

    That of a reranker is made of its LM head (`classifier_from_token`), which scores by its next token.
    """
    if fields.get("classifier_from_token") is not None:
        return False
    names = fields.get("architectures")
    return isinstance(names, list) and any(str(name).endswith("ForSequenceClassification") for name in names)


def read_head(path: str | pathlib.Path, *, hidden_size: int) -> ClassificationHead | None:
    """Return the classification head of a model directory, None if it has none. Raises CheckpointError."""
    directory = pathlib.Path(path)
    config = directory / "config.json"
    if not config.is_file() or not is_classifier(fields := read_config(config)):
        return None
    for file in sorted(directory.glob("*.safetensors")):
        with safetensors.safe_open(file, framework="numpy") as tensors:
            if HEAD in tensors.keys():  # noqa: SIM118 (the file is no dict)
                if (dtype := tensors.get_slice(HEAD).get_dtype()) not in FLOAT_NAMES:
                    raise CheckpointError(f"{directory}: {HEAD} is {dtype}: a head of codes is not supported")
                weight = np.asarray(tensors.get_tensor(HEAD)).astype(np.float32)
                break
    else:
        raise CheckpointError(f"{directory} does not fit its config.json; tensors missing: {HEAD}")
    if weight.ndim != 2 or weight.shape[1] != hidden_size:
        raise CheckpointError(f"{directory}: {HEAD} is {list(weight.shape)}, not [labels, {hidden_size}]")
    names = fields.get("id2label")
    known = names if isinstance(names, dict) else {}
    activation = _activation(fields.get("problem_type"), num_labels=len(weight))
    return ClassificationHead(
        weight=weight,
        labels=tuple(str(known.get(str(index), f"LABEL_{index}")) for index in range(len(weight))),
        activation=activation,
        score_activation=_score_activation(named_activation(directory, fields), activation),
        has_pairs=all(fields.get(name) is not False for name in ("use_sep_token", "use_pad_token")),
    )


def _activation(problem_type: Any, *, num_labels: int) -> Activation:
    if problem_type == "regression":
        return identity
    return sigmoid if problem_type == "multi_label_classification" or num_labels == 1 else softmax


def _score_activation(named: Any, default: Activation) -> Activation:
    """Return the activation that sentence-transformers have named for scores, else the one of `/classify`."""
    if named is None:
        return default
    activation = read_activation(named, field="activation_fn")
    return sigmoid if activation is softmax else activation  # the softmax of one logit would be 1
