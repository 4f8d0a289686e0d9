"""The result of a pooling request: one vector for a text. No jax here."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from jaxtyping import Float32

from jaxserve.errors import InvalidRequest
from jaxserve.loading.sentence_transformers import Embedder
from jaxserve.loading.sentence_transformers import normalize as normalized
from jaxserve.sampling_params import SamplingParams
from jaxserve.values import convert, rule

NO_HEAD = "this model has no classification head: it generates and embeds texts"
NO_LM_HEAD = "this model has a classification head and no LM head: it classifies texts, and generates none"
POOLING_PARAMS = SamplingParams(temperature=0.0, max_tokens=1)
"""The sampling of a request that wants no token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingOutput:
    """The vector of one text. `prompt` is None if token ids were given."""

    prompt: str | None
    prompt_token_ids: list[int]
    embedding: Float32[np.ndarray, " E"]
    num_cached_tokens: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassificationOutput:
    """The probabilities of a text's labels. `prompt` is None if token ids were given."""

    prompt: str | None
    prompt_token_ids: list[int]
    probs: list[float]
    labels: tuple[str, ...]

    @property
    def label(self) -> str:
        """The most probable label."""
        return self.labels[max(range(len(self.probs)), key=self.probs.__getitem__)]


def pooled_vector(pooled: bytes) -> Float32[np.ndarray, " E"]:
    """Return the vector that the engine has pooled."""
    return np.frombuffer(pooled, "<f4").astype(np.float32)


def finish_embedding(
    pooled: bytes, embedder: Embedder, *, dimensions: int | None = None, normalize: bool | None = None
) -> Float32[np.ndarray, " E"]:
    """Make the vector for the caller from what the engine has pooled.

    After the embedder's layers it has the first `dimensions` entries (for models trained for this, Kusupati et al.
    2022, arXiv:2205.13147), scaled to length 1 if `normalize`. None for either does what the embedder does.
    """
    vector = pooled_vector(pooled)
    for layer in embedder.layers:
        vector = layer(vector)
    vector = vector[: embedder.dimensions if dimensions is None else dimensions]
    return normalized(vector) if (embedder.normalizes if normalize is None else normalize) else vector


def matryoshka_dimensions(hf_config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the lengths that a config.json names for shorter vectors, () for any; None if it speaks of none."""
    named = hf_config.get("matryoshka_dimensions")
    if isinstance(named, list) and named and all(type(length) is int for length in named):
        return tuple(named)
    return () if hf_config.get("is_matryoshka") is True else None


def check_dimensions(dimensions: int | None, *, size: int, allowed: Sequence[int] | None) -> int | None:
    """Return `dimensions` as a plain number; `allowed` is `EngineInfo.embedding_dimensions`.

    Raises InvalidRequest unless a vector has that many entries, and the model was trained to be cut to them.
    """
    if dimensions is None:
        return None
    number = convert("dimensions", dimensions, rule(Annotated[int, msgspec.Meta(ge=1, le=size)]))
    if number == size or allowed == () or number in (allowed or ()):
        return number
    known = f"{', '.join(map(str, allowed))} and {size}" if allowed else str(size)
    raise InvalidRequest(
        f"this model was not trained for vectors of {number} dimensions: it has {known}", param="dimensions"
    )
