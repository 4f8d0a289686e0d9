"""Activations that files of sentence-transformers name as classes of torch, in NumPy. No jax."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError

Activation = Callable[[np.ndarray], np.ndarray]


def softmax(x: np.ndarray) -> np.ndarray:
    """Return the softmax over all entries."""
    powers = np.exp(x - x.max())
    return powers / powers.sum()


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return the sigmoid of each entry."""
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def identity(x: np.ndarray) -> np.ndarray:
    """Return `x`."""
    return x


def _gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


_ACTIVATIONS: Mapping[str, Activation] = {
    "Identity": identity,
    "Sigmoid": sigmoid,
    "Softmax": softmax,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "GELU": _gelu,
    "SiLU": lambda x: x * sigmoid(x),
}


def read_activation(name: Any, *, field: str) -> Activation:
    """Return the activation that `field` names, such as torch.nn.modules.activation.Tanh. Raises CheckpointError."""
    is_torchs = isinstance(name, str) and name.startswith("torch.nn.")
    if not is_torchs or (short := name.rpartition(".")[2]) not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise CheckpointError(f"{field} {name!r:.100} is not supported; known are {known} of torch.nn")
    return _ACTIVATIONS[short]
