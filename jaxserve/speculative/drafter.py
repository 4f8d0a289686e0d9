"""Drafter: the interface of proposers with weights. They run inside the model's own passes, and what they keep of
tokens lies in the blocks of the request, so that cached prefixes, preemption and chunked prompts hold for them, too.

`execution.drafting` calls them: in each pass with all tokens of the step, and at the beginning of a step that verifies
drafts once for each draft.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, override

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxserve.layers.batch import Batch, KVCache
from jaxserve.layers.cache import CacheSizes, CacheSpec
from jaxserve.layers.context import StepContext
from jaxserve.layers.params import Params
from jaxserve.speculative.proposer import NewTokens, Proposer


class Drafter(abc.ABC):
    """A model that drafts. Its weights are the entry "drafter" of the target's tree; all functions get the whole tree.

    Instances are immutable and hashable: programs are compiled for them.
    """

    num_drafts: int
    """Largest number of tokens that it drafts for a row."""

    @property
    @abc.abstractmethod
    def layer_specs(self) -> tuple[CacheSpec, ...]:
        """What each of its layers keeps of a token."""

    @property
    def feature_size(self) -> int:
        """Size of the vector that it is given with each token; 0: none.

        The vector is a feature of the token before, in the target or, behind the first draft, in the drafter itself.
        The pair of a feature and the token after it lies at the feature's position.
        """
        return 0

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose inputs `features` reads, ascending."""
        return ()

    @property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """What is kept of a token: by each layer, then its feature."""
        return (*self.layer_specs, FeatureSpec(self.feature_size)) if self.feature_size else self.layer_specs

    @abc.abstractmethod
    def specs(self) -> Params:
        """Declare its weights."""

    def features(
        self,
        params: Params,
        tapped: Sequence[Float[Array, "T E"]],
        hidden: Float[Array, "T E"],
        context: StepContext,
    ) -> Float[Array, "T F"]:
        """Return the features of tokens: from the residual stream before the layers of `taps`, or, as here, from the
        target's hidden states behind its last norm.
        """
        del params, tapped, context
        return hidden

    @abc.abstractmethod
    def run(
        self, params: Params, batch: Batch, features: Float[Array, "T F"] | None, cache: KVCache
    ) -> tuple[Float[Array, "T E"], KVCache]:
        """Run its layers; return hidden states, which are the next tokens' features, and the cache of its layers."""

    @abc.abstractmethod
    def logits(self, params: Params, hidden: Float[Array, "N E"], context: StepContext) -> Float[Array, "N V"]:
        """Return float32 logits for the target's vocabulary, which may be sharded."""


class Features(NamedTuple):
    """A vector a token, in P blocks; donated."""

    values: Float[Array, "P S F"]

    def write(self, features: Float[Array, "T F"], index: Int[Array, " T"]) -> "Features":
        """Write vectors to positions of the pool; those behind its end are dropped."""
        place = index // self.values.shape[1], index % self.values.shape[1]
        written = self.values.at[place].set(features.astype(self.values.dtype), mode="drop", unique_indices=True)
        # Otherwise XLA joins the write of one vector with reads behind it, for which it keeps a copy of the whole pool.
        return Features(jax.lax.optimization_barrier(written))

    def read(self, index: Int[Array, " T"]) -> Float[Array, "T F"]:
        """Return the vectors at positions of the pool."""
        return self.values.reshape(-1, self.values.shape[-1]).at[index].get(mode="clip")


@dataclasses.dataclass(frozen=True)
class FeatureSpec:
    """Declare a vector for each token, whole on every device."""

    sliding_window = None  # only the vector of the token before is read
    keeps_state = False

    size: int

    def abstract(self, sizes: CacheSizes, *, dtype: jnp.dtype, mesh: Mesh | AbstractMesh) -> Features:
        """Return the shape of the pool."""
        shape = sizes.num_blocks, sizes.block_size, self.size
        pool: Any = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(None, None, None)))
        return Features(pool)

    def describe(self) -> str:
        """Return the size of the vector."""
        return f"a feature of {self.size}"


@dataclasses.dataclass(frozen=True)
class Later(Proposer):
    """Proposes nothing at the end of a step: a Drafter does at the beginning of the next one, when there are blocks for
    what it keeps.
    """

    num_drafts: int

    @override
    def init_state(self, *, num_slots: int, max_length: int) -> tuple[()]:
        return ()

    @override
    def admit(
        self, state: tuple[()], slots: Int[Array, " R"], starts: Int[Array, " R"], token_ids: Int[Array, "R K"]
    ) -> tuple[()]:
        return state

    @override
    def propose(self, state: tuple[()], new: NewTokens) -> tuple[tuple[()], Int[Array, "R k"], Int[Array, " R"]]:
        return state, jnp.zeros((new.slots.shape[0], self.num_drafts), jnp.int32), jnp.zeros_like(new.counts)
