"""Draft model: a smaller model of the same vocabulary drafts token by token (Leviathan et al. 2023, arXiv:2211.17192;
Chen et al. 2023, arXiv:2302.01318).
"""

import dataclasses
from typing import Any, override

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.errors import ConfigError
from jaxserve.layers.batch import Batch, KVCache
from jaxserve.layers.cache import CacheSpec, source_of
from jaxserve.layers.context import StepContext
from jaxserve.layers.embedding import gathered
from jaxserve.layers.params import Params
from jaxserve.models import get_family, with_context
from jaxserve.models.family import Family
from jaxserve.speculation import Speculation
from jaxserve.speculative.drafter import Drafter


@dataclasses.dataclass(frozen=True)
class DraftModel(Drafter):
    """A model of any family whose layers keep no states."""

    num_drafts: int
    family: Family
    config: Any
    context: int
    vocab_size: int
    """The target's; tokens by which only one of both vocabularies is padded are not drafted."""

    @classmethod
    def of(
        cls, speculation: Speculation, target: dict[str, Any], fields: dict[str, Any] | None, context: int
    ) -> "DraftModel":
        """Make the drafter of these options, from both config.json; it reads texts of up to `context` tokens. Raises
        ConfigError for a model that cannot draft.
        """
        assert fields is not None
        family = get_family(fields)
        config = family.config(fields)
        if any(spec.keeps_state for spec in family.kv_specs(config)):
            raise ConfigError(
                "speculative_config: model has layers that keep a state, which rejected drafts would change"
            )
        if any(source_of(spec) is not None for spec in family.kv_specs(config)):
            raise ConfigError("speculative_config: model has layers that read keys and values of others")
        vocab_size = get_family(target).config(target).vocab_size
        return cls(speculation.num_drafts, family, config, context, vocab_size)

    @property
    def _served(self) -> Any:
        return with_context(self.config, self.context)

    @property
    @override
    def layer_specs(self) -> tuple[CacheSpec, ...]:
        return self.family.kv_specs(self._served)

    @override
    def specs(self) -> Params:
        return self.family.param_specs(self.config)

    @override
    def run(
        self, params: Params, batch: Batch, features: Float[Array, "T F"] | None, cache: KVCache
    ) -> tuple[Float[Array, "T E"], KVCache]:
        return self.family.forward(params["drafter"], self._served, batch, cache)

    @override
    def logits(self, params: Params, hidden: Float[Array, "N E"], context: StepContext) -> Float[Array, "N V"]:
        logits = self.family.head(params["drafter"], self._served, hidden, context)
        own = self.config.vocab_size
        if own == self.vocab_size:
            return logits
        logits = gathered(logits)[:, : self.vocab_size]
        return jnp.pad(logits, ((0, 0), (0, max(self.vocab_size - own, 0))), constant_values=-jnp.inf)
