"""What a layer keeps of the tokens that it has seen, from one step to the next: a LayerCache, declared by a CacheSpec.

A LayerCache is a pytree, usually a NamedTuple of arrays, with the operations that layers of its kind call. So a layer
does not depend on pages or kernels, and a model may have layers of several kinds. `execution.kv_cache` makes the
arrays.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

KV_DTYPES = {
    "fp8": jnp.dtype(jnp.float8_e4m3fn),
    "fp8_e4m3": jnp.dtype(jnp.float8_e4m3fn),
    "fp8_e5m2": jnp.dtype(jnp.float8_e5m2),
    "int8": jnp.dtype(jnp.int8),
}
"""The dtypes of 8 bits in which caches hold vectors, by the names that options have."""


class CacheSizes(NamedTuple):
    """How much a cache holds: blocks of tokens, and slots of requests."""

    num_blocks: int
    block_size: int
    num_slots: int


@runtime_checkable
class CacheSpec(Protocol):
    """What one layer keeps, as a family declares it: a frozen dataclass. Layers of equal specs may use one cache."""

    @property
    def sliding_window(self) -> int | None:
        """Number of tokens, itself included, that a token attends to; None if all before it."""
        ...

    @property
    def keeps_state(self) -> bool:
        """True if the layer keeps one state per slot, which every token replaces: arrays whose first axis is that of
        slots. Then it has nothing in blocks, except for SeveralSpecs.

        Then another request starts from what one has computed only where the state was copied.
        """
        ...

    def abstract(self, sizes: CacheSizes, *, dtype: jnp.dtype, mesh: Mesh | AbstractMesh) -> Any:
        """Return the LayerCache with the shapes and shardings of its arrays; `dtype` is that of activations."""
        ...

    def describe(self) -> str:
        """Return what is kept, in the words that `jaxserve models` prints."""
        ...


@dataclasses.dataclass(frozen=True)
class SeveralSpecs:
    """Declare a LayerCache that is a tuple of others: a state, and keys and values of all tokens."""

    parts: tuple[CacheSpec, ...]

    def __post_init__(self) -> None:
        """Raise ValueError for a window, which would be that of one part alone."""
        if self.sliding_window is not None:
            raise ValueError("layers that keep a state, too, attend to all tokens")

    @property
    def sliding_window(self) -> int | None:
        """None: all tokens are attended to."""
        return next((part.sliding_window for part in self.parts if part.sliding_window is not None), None)

    @property
    def keeps_state(self) -> bool:
        """True if a part is a state."""
        return any(part.keeps_state for part in self.parts)

    def abstract(self, sizes: CacheSizes, *, dtype: jnp.dtype, mesh: Mesh | AbstractMesh) -> tuple[Any, ...]:
        """Return the parts."""
        return tuple(part.abstract(sizes, dtype=dtype, mesh=mesh) for part in self.parts)

    def describe(self) -> str:
        """Return what the parts are."""
        return " and ".join(part.describe() for part in self.parts)


def parts_of(spec: CacheSpec) -> tuple[CacheSpec, ...]:
    """Return what a layer keeps, each kind by itself."""
    return spec.parts if isinstance(spec, SeveralSpecs) else (spec,)


def hold_in(specs: Sequence[CacheSpec], dtype: jnp.dtype | None) -> tuple[CacheSpec, ...]:
    """Return the specs with a dtype of 8 bits for the vectors that they declare; None: that of activations.

    Specs of vectors have a field `dtype`. What others keep, states for instance, is not changed.
    """

    def hold(spec: CacheSpec) -> CacheSpec:
        if isinstance(spec, SeveralSpecs):
            return SeveralSpecs(tuple(map(hold, spec.parts)))
        return dataclasses.replace(cast(Any, spec), dtype=dtype) if hasattr(spec, "dtype") else spec

    return tuple(map(hold, specs))


def source_of(spec: CacheSpec) -> int | None:
    """Return the earlier layer whose keys and values a layer reads instead of its own; None if it has its own.

    Specs of layers that may do so have a field `source`.
    """
    return getattr(spec, "source", None)
