"""What callers see of a pooling request: one vector for a text. No jax here."""

import dataclasses
from typing import Annotated

import msgspec
import numpy as np
from jaxtyping import Float32

from jaxserve.request import SamplingParams
from jaxserve.values import convert, rule

POOLING_PARAMS = SamplingParams(temperature=0.0, max_tokens=1)
"""The sampling of a request that wants no token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingOutput:
    """The vector of one text. `prompt` is None where token ids were given."""

    prompt: str | None
    prompt_token_ids: list[int]
    embedding: Float32[np.ndarray, " E"]
    num_cached_tokens: int = 0


def finish_embedding(
    pooled: bytes, *, dimensions: int | None = None, normalize: bool = True
) -> Float32[np.ndarray, " E"]:
    """The vector that a caller gets, from what the engine has pooled: its first `dimensions` entries (for models that
    were trained for this, Kusupati et al. 2022, arXiv:2205.13147), of length 1 if `normalize`.
    """
    vector = np.frombuffer(pooled, "<f4")[:dimensions].astype(np.float32)
    if not normalize:
        return vector
    norm = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector.astype(np.float64) / norm).astype(np.float32) if norm > 0.0 else vector


def check_dimensions(dimensions: int | None, hidden_size: int) -> int | None:
    """Return `dimensions` as a plain number. Raises InvalidRequest unless a vector has so many entries."""
    if dimensions is None:
        return None
    return convert("dimensions", dimensions, rule(Annotated[int, msgspec.Meta(ge=1, le=hidden_size)]))
