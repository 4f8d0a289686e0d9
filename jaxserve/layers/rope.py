"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split order of Hugging Face checkpoints."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Positions are divided by `factor` (Chen et al. 2023, arXiv:2306.15595).

    No rotation depends on the original context, which says how far texts may reach, 0 where that is not known.
    """

    factor: float
    original_max_position_embeddings: int = dataclasses.field(default=0, compare=False)


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
class PairScaling:
    """Stretches the wavelength of each pair by a factor of its own."""

    factors: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProportionalScaling:
    """Rotates the first `num_pairs` pairs of a head, whose dimensions are half a head apart, and no others. Their
    wavelengths are those of a head that is rotated whole, stretched by `factor`.
    """

    num_pairs: int
    factor: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): one factor per pair for the original context, others beyond it.

    Rotated vectors are scaled by `attention_factor`, so that scores stay as sharp over more keys. transformers switches
    to the long factors once a sequence exceeds the original context, and then recomputes all of it. Here they apply to
    all requests to a server of a longer `context`, since keys are rotated before they are cached and shared; a server
    of no more than the original context computes what transformers does.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    attention_factor: float
    original_max_position_embeddings: int
    context: int
    short_attention_factor: float | None = None
    """That of a server of no more than the original context, if it has another one, as Phi-3.5 MoE."""

    @property
    def length(self) -> float:
        """The factor of rotated vectors for the served context."""
        is_long = self.context > self.original_max_position_embeddings
        if is_long or self.short_attention_factor is None:
            return self.attention_factor
        return self.short_attention_factor

    @property
    def factors(self) -> tuple[float, ...]:
        """The factors for the served context."""
        return self.long_factors if self.context > self.original_max_position_embeddings else self.short_factors


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): waves that turn often in the original context stay, long ones stretch.

    Pairs that turn between `beta_fast` and `beta_slow` times in it are blended; the range of these pairs is made of
    whole ones if `is_truncated`. Rotated vectors are made longer by `attention_factor`.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True
    score_factor: float = 1.0
    """An additional factor of the attention scores, which only DeepSeek's models have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicScaling:
    """Dynamic NTK: the base grows with the length of the texts, once it exceeds the original context.

    transformers uses the length of the sequence so far, so that keys in its cache have been rotated with other bases
    than the queries that attend to them. Here it is `context`, the longest text that is served: as for LongRoPE, all
    requests use one base, and a server of no more than the original context computes what transformers does.
    """

    factor: float
    original_max_position_embeddings: int
    context: int


Scaling = (
    LinearScaling | Llama3Scaling | PairScaling | ProportionalScaling | LongRopeScaling | YarnScaling | DynamicScaling
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotation of the first `head_dim` dimensions of heads: the base `theta`, and how it is stretched for long texts.

    The remaining dimensions of a head are not rotated.
    """

    head_dim: int
    theta: float
    scaling: Scaling | None = None

    @property
    def max_context(self) -> int:
        """Number of tokens that the scaling, beyond what the model was made for, allows; 0 if it specifies none."""
        if isinstance(self.scaling, LinearScaling | YarnScaling | DynamicScaling):
            return int(self.scaling.factor * self.scaling.original_max_position_embeddings)
        return 0

    def serving(self, context: int) -> "Rope":
        """Return the rotation for texts of up to `context` tokens."""
        if isinstance(self.scaling, LongRopeScaling | DynamicScaling):
            return dataclasses.replace(self, scaling=dataclasses.replace(self.scaling, context=context))
        return self


def frequencies(rope: Rope) -> np.ndarray:
    """Radians a position for each of the head_dim / 2 pairs; computed in float64, rounded once to float32."""
    exponent = np.arange(0, rope.head_dim, 2, dtype=np.float64) / rope.head_dim
    frequency = rope.theta**-exponent
    match rope.scaling:
        case None:
            scaled = frequency
        case LinearScaling():
            scaled = frequency / rope.scaling.factor
        case ProportionalScaling(num_pairs=num_pairs, factor=factor):
            scaled = np.where(np.arange(len(frequency)) < num_pairs, frequency / factor, 0.0)
        case Llama3Scaling():
            scaled = _scale_llama3(frequency, rope.scaling)
        case PairScaling() | LongRopeScaling():
            scaled = frequency / np.asarray(rope.scaling.factors)
        case YarnScaling():
            scaled = _scale_yarn(frequency, rope, rope.scaling)
        case DynamicScaling():
            scaled = frequency * _dynamic_stretch(rope.scaling) ** (-exponent * rope.head_dim / (rope.head_dim - 2))
    return scaled.astype(np.float32)


def _scale_llama3(frequency: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)  # in the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # Llama 4 Scout has two equal ones: no wavelength is blended.
    unscaled_fraction = np.clip((turns - low) / (high - low), 0.0, 1.0) if low < high else turns >= low
    return unscaled_fraction * frequency + (1 - unscaled_fraction) * frequency / scaling.factor


def _scale_yarn(frequency: np.ndarray, rope: Rope, scaling: YarnScaling) -> np.ndarray:
    def pair_that_turns(times: float) -> float:  # so often in the original context; a fraction, between two pairs
        wavelength = scaling.original_max_position_embeddings / times
        return rope.head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.head_dim - 1)
    width = last - first or 0.001  # a step where they meet
    scaled_fraction = np.clip((np.arange(len(frequency)) - first) / width, 0.0, 1.0)
    return (1 - scaled_fraction) * frequency + scaled_fraction * frequency / scaling.factor


def _dynamic_stretch(scaling: DynamicScaling) -> float:
    original = scaling.original_max_position_embeddings
    return scaling.factor * max(scaling.context, original) / original - (scaling.factor - 1)


Rotation = tuple[Float[Array, "T half"], Float[Array, "T half"]]
"""Cosine and sine of the angles of each token, float32."""


def rotations(rope: Rope, positions: Int[Array, " T"]) -> Rotation:
    """Cosine and sine of each token's angles, float32; one pair serves all layers of a step."""
    angles = positions.astype(jnp.float32)[:, None] * frequencies(rope)[None, :]
    match rope.scaling:
        case LongRopeScaling(length=length) | YarnScaling(attention_factor=length):
            pass
        case _:
            length = 1.0
    return length * jnp.cos(angles), length * jnp.sin(angles)


def half_split_order(head_dim: int, num_interleaved: int) -> np.ndarray:
    """Return the order in which rotations expect the dimensions of a head that a checkpoint rotates as pairs (2i, 2i +
    1).

    The first `num_interleaved` dimensions are rotated that way; with 0 the order is unchanged. Scores do not depend on
    the order, so reordering the weights of q and k once saves a shuffle of every token.
    """
    dims = np.arange(head_dim)
    return np.concatenate([dims[:num_interleaved:2], dims[1:num_interleaved:2], dims[num_interleaved:]])
