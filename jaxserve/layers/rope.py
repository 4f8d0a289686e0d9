"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split order of Hugging Face checkpoints."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Positions are divided by `factor` (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: wavelengths well inside the original context stay, those beyond it are stretched by `factor`.

    Between original_max_position_embeddings / high_freq_factor and / low_freq_factor the two are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): every pair's wavelength is stretched by a factor of its own.

    Rotated vectors are made longer by `attention_factor`, so that scores stay as sharp over more keys.
    """

    factors: tuple[float, ...]
    attention_factor: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotation of the first `head_dim` dimensions of heads: the base `theta`, and how it is stretched for long texts.

    What a head has beyond them is not rotated.
    """

    head_dim: int
    theta: float
    scaling: LinearScaling | Llama3Scaling | LongRopeScaling | None = None


def frequencies(rope: Rope) -> np.ndarray:
    """Radians a position for each of the head_dim / 2 pairs; computed in float64, rounded once to float32."""
    frequency = rope.theta ** (-np.arange(0, rope.head_dim, 2, dtype=np.float64) / rope.head_dim)
    match rope.scaling:
        case None:
            scaled = frequency
        case LinearScaling():
            scaled = frequency / rope.scaling.factor
        case Llama3Scaling():
            scaled = _scale_llama3(frequency, rope.scaling)
        case LongRopeScaling():
            scaled = frequency / np.asarray(rope.scaling.factors)
    return scaled.astype(np.float32)


def _scale_llama3(frequency: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)  # in the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    unscaled_share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return unscaled_share * frequency + (1 - unscaled_share) * frequency / scaling.factor


def rotations(rope: Rope, positions: Int[Array, " T"]) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    """Cosine and sine of each token's angles, float32; one pair serves all layers of a step."""
    angles = positions.astype(jnp.float32)[:, None] * frequencies(rope)[None, :]
    length = rope.scaling.attention_factor if isinstance(rope.scaling, LongRopeScaling) else 1.0
    return length * jnp.cos(angles), length * jnp.sin(angles)


def apply_rope(
    x: Float[Array, "T H D"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]
) -> Float[Array, "T H D"]:
    """Rotate the pairs (i, i + half) of every head by its token's angles, in float32; the rest of the head stays."""
    half = cos.shape[-1]
    first, second, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1).astype(x.dtype)


def half_split_order(head_dim: int, num_interleaved: int) -> np.ndarray:
    """The order in which `apply_rope` wants the dimensions of a head that a checkpoint rotates as pairs (2i, 2i + 1).

    `num_interleaved` of them, from the first on, are rotated so; with 0 nothing moves. Scores do not depend on the
    order, so that weights of q and k reordered once save a shuffle of every token.
    """
    dims = np.arange(head_dim)
    return np.concatenate([dims[:num_interleaved:2], dims[1:num_interleaved:2], dims[num_interleaved:]])
