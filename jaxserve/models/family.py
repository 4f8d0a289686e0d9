"""Family: a model as a value: its layers, and the stages below and above them, which most decoders have in common."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import Array, Float

from jaxserve.errors import CheckpointError
from jaxserve.layers.batch import Batch, KVCache
from jaxserve.layers.cache import CacheSpec
from jaxserve.layers.context import StepContext
from jaxserve.layers.decoder import decoder_specs, run_layers
from jaxserve.layers.embedding import embed, unembed
from jaxserve.layers.layer import Layer
from jaxserve.layers.names import LLAMA_NAMES, Names
from jaxserve.layers.params import Params
from jaxserve.models.hf_config import Fields, with_defaults
from jaxserve.models.reading import read_config


def embed_tokens(params: Params, config: Any, batch: Batch) -> Float[Array, "T E"]:  # noqa: ARG001
    """Return the residual stream before the first layer: the rows of the embedding."""
    return embed(params["embed"], batch)


def logits(params: Params, config: Any, hidden: Float[Array, "N E"], context: StepContext) -> Float[Array, "N V"]:
    """Return logits in float32, by the embedding or a matrix of their own, with a bias where there is one."""
    table = params["embed" if config.tie_word_embeddings else "lm_head"]
    return unembed(table, hidden, params.get("lm_head_bias"), context)


def layers_of(config: Any) -> tuple[Layer, ...]:
    """Return the layers that a `DecoderConfig` describes."""
    return config.layers


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models. All functions are pure; a config is hashable, and the first argument except for the weights.

    Attributes:
        Config: frozen, with `vocab_size`, `hidden_size`, `num_layers`, `max_position_embeddings` and
            `tie_word_embeddings`. Most extend `DecoderConfig`.
        defaults: those of transformers, for fields that a config.json omits.
        read: makes the Config of fields that have their defaults; by default `read_config` does.
        aliases, old_names: other names of fields, as `hf_config.with_defaults` takes them.
        revise: changes the fields of a config.json before it gets its defaults.
        layers: what the layers consist of; by default what the Config's `layers` says.
        names: the names of the weights in a checkpoint, or a function of the config that returns them.
        amend: changes the declaration of the weights that follows from the layers: adds what is beside them, or
            replaces what a checkpoint stores in another way.
        embed: the first stage, from tokens to the residual stream.
        layer_inputs: what the layers' own embeddings make of the tokens, [L, T, P]; None in most families.
        head: the last stage, from hidden states to logits.
        doc: the module's docstring, which begins with the checkpoints that are supported.
        features: features of all checkpoints that no field of the config mentions, and the fields that the family
            reads and that are None by default, as far as `jaxserve models` shows them.
    """

    Config: type[Any]
    defaults: Fields = dataclasses.field(hash=False)
    read: Callable[[Fields], Any] | None = None
    _: dataclasses.KW_ONLY
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    old_names: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    revise: Callable[[Fields], Fields] | None = None
    layers: Callable[[Any], tuple[Layer, ...]] = layers_of
    names: Names | Callable[[Any], Names] = LLAMA_NAMES
    amend: Callable[[Params, Any], Params] | None = None
    embed: Callable[[Params, Any, Batch], Array] = embed_tokens
    layer_inputs: Callable[[Params, Any, Batch], Array | None] | None = None
    head: Callable[[Params, Any, Array, StepContext], Array] = logits
    doc: str | None
    features: tuple[str, ...] = ()

    def config(self, fields: Fields) -> Any:
        """Return the Config of a config.json. Raises CheckpointError, naming the field that is missing or not
        supported.
        """
        fields = fields if self.revise is None else self.revise(fields)
        given = {new: old for old, new in self.old_names.items() if old in fields and new not in fields}
        given |= {new: alias for alias, new in self.aliases.items() if alias in fields}
        fields = with_defaults(fields, self.defaults, old_names=self.old_names, aliases=self.aliases)
        try:
            return read_config(self.Config, fields) if self.read is None else self.read(fields)
        except CheckpointError as error:
            raise CheckpointError(re.sub(r"\w+", lambda word: given.get(word[0], word[0]), str(error))) from None

    def param_specs(self, config: Any) -> Params:
        """Declare every weight; "layers" is a list."""
        names = self.names if isinstance(self.names, Names) else self.names(config)
        specs = decoder_specs(config, self.layers(config), names=names)
        return specs if self.amend is None else self.amend(specs, config)

    def kv_specs(self, config: Any) -> tuple[CacheSpec, ...]:
        """Return what each layer keeps from step to step."""
        return tuple(layer.mixer.cache_spec for layer in self.layers(config))

    def run(
        self, params: Params, config: Any, x: Float[Array, "T E"], batch: Batch, kv_cache: KVCache, span: range
    ) -> tuple[Float[Array, "T E"], KVCache]:
        """Run the stages in between, any range of layers, as `run_layers` does."""
        batch = self.with_layer_inputs(params, config, batch)
        return run_layers(self.layers(config), params, x, batch, kv_cache, span)

    def with_layer_inputs(self, params: Params, config: Any, batch: Batch) -> Batch:
        """Return the batch as layers take it."""
        if self.layer_inputs is None:
            return batch
        return dataclasses.replace(batch, layer_inputs=self.layer_inputs(params, config, batch))

    def forward(
        self, params: Params, config: Any, batch: Batch, kv_cache: KVCache
    ) -> tuple[Float[Array, "T E"], KVCache]:
        """Run all stages but the head: hidden states after the final norm, and the cache after this step."""
        x = self.embed(params, config, batch)
        return self.run(params, config, x, batch, kv_cache, range(config.num_layers))
