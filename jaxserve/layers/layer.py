"""A layer as a value: what it consists of. Its weights, its cache and the kernels that it may have follow from that."""

import dataclasses
import enum
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float

from jaxserve.layers.activations import scaled
from jaxserve.layers.altup import AltUp, Laurel
from jaxserve.layers.batch import LayerStep
from jaxserve.layers.cache import CacheSpec
from jaxserve.layers.dense_and_experts import DenseAndExperts
from jaxserve.layers.layer_input import LayerInput
from jaxserve.layers.linear import Consumer
from jaxserve.layers.mlp import FeedForward
from jaxserve.layers.moe import Experts
from jaxserve.layers.names import LLAMA_NAMES, Names
from jaxserve.layers.norm import Norm, PendingUpdate, add_update
from jaxserve.layers.params import Params, ParamSpec
from jaxserve.layers.rope import Rope
from jaxserve.layers.weight import Weight

PRE_NORMS = ("attention_norm", "mlp_norm")
"""A norm before each block, as in Llama."""

POST_NORMS = ("attention_post_norm", "mlp_post_norm")
"""A norm of each block's update, as in OLMo 2."""

SANDWICH_NORMS = PRE_NORMS + POST_NORMS
"""Both, as in Gemma 2."""

ONE_NORM = ("attention_norm",)
"""One norm before two parallel blocks, as in GPT-J."""


@runtime_checkable
class Mixer(Protocol):
    """The block of a layer in which tokens meet those before them: a frozen dataclass, such as `Attention`."""

    @property
    def rope(self) -> Rope | None:
        """How positions rotate what the block computes; None if they do not."""
        ...

    @property
    def cache_spec(self) -> CacheSpec:
        """What the layer keeps from step to step."""
        ...

    @property
    def why_not_fused(self) -> str | None:
        """Why no kernel has the block's projections together with what is around them, or None if some do."""
        ...

    def specs(self, prefix: str, hidden_size: int, names: Names) -> Params:
        """Declare the weights; `prefix` names the block in the checkpoint."""
        ...

    def reader(self, params: Params) -> Weight | None:
        """Return the only weight that is multiplied by the block's input as it is; None if there is none."""
        ...

    def run(self, params: Params, x: Any, step: LayerStep, *, consumer: Consumer) -> tuple[Any, Any]:
        """Return the update of the residual stream, in a form that the consumer takes, and the updated LayerCache."""
        ...


class Arrangement(enum.StrEnum):
    """How the two blocks of a layer update the residual stream."""

    SEQUENTIAL = "one block after the other"
    PARALLEL = "parallel blocks"  # Wang and Komatsuzaki 2021
    NORMED_INPUTS = "updates of normalised inputs"
    NORMED_SUMS = "normalised sums"  # Vaswani et al. 2017, arXiv:1706.03762


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of a model.

    Attributes:
        hidden_size: the size E of the residual stream.
        feed_forward: the block after the mixer; None if a layer has no other block.
        norm: the kind of the layer's norms, and of the final one if it is the last layer.
        norms: which norms the layer has, by the names of their weights. Those before the blocks normalise their inputs,
            those after them ("post") their updates. Parallel blocks with "attention_norm" alone read it both.
        update_scale: a factor of both blocks' updates.
        mixer_name: the mixer's module in the checkpoint, if layers differ in it; by default that of `Names`. Empty if
            the layer itself has the mixer's modules.
        layer_input: a third block, in sequential layers; None if there is none.
        has_scalar: the residual stream is multiplied by a weight after the last block, in sequential layers.
        laurel: a branch beside the attention, in sequential layers: the feed-forward reads the sum of stream, update
            and branch, divided by the root of 2. None if there is none.
        streams: the blocks read and update one of several residual streams, and the third block updates all but the
            first of them; None if there is one stream.
    """

    hidden_size: int
    mixer: Mixer
    feed_forward: FeedForward | Experts | DenseAndExperts | None
    norm: Norm
    norms: tuple[str, ...] = PRE_NORMS
    arrangement: Arrangement = Arrangement.SEQUENTIAL
    update_scale: float = 1.0
    mixer_name: str | None = None
    layer_input: LayerInput | None = None
    has_scalar: bool = False
    laurel: Laurel | None = None
    streams: AltUp | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for what the arrangement would leave out."""
        if self.feed_forward is None and (self.arrangement, self.norms) != (Arrangement.SEQUENTIAL, ONE_NORM):
            raise ValueError(f"a layer without a feed-forward has {ONE_NORM}, got {self.norms}")
        if self.arrangement == Arrangement.SEQUENTIAL:
            needed, known = (), SANDWICH_NORMS
        elif self.arrangement == Arrangement.PARALLEL:
            needed, known = ONE_NORM, PRE_NORMS
        else:
            needed, known = PRE_NORMS, PRE_NORMS
            if self.update_scale != 1.0:
                raise ValueError(f"{self.arrangement}: updates are not scaled, got update_scale={self.update_scale}")
        further = (self.layer_input, self.laurel, self.streams, self.has_scalar or None)
        if self.arrangement != Arrangement.SEQUENTIAL and further != (None,) * 4:
            raise ValueError(f"{self.arrangement}: there is no further block, stream or factor")
        if self.streams is not None and (self.layer_input is None or self.has_scalar):
            raise ValueError("several streams need a third block, and have no factor")
        if self.feed_forward is None and self.laurel is not None:
            raise ValueError("a branch beside the attention needs a feed-forward after it")
        if not set(needed) <= set(self.norms) <= set(known):
            raise ValueError(f"{self.arrangement}: norms must be among {known}, with {needed}, got {self.norms}")

    def specs(self, prefix: str, names: Names = LLAMA_NAMES) -> Params:
        """Declare the weights; `prefix` names the layer in the checkpoint."""
        mixer = names.attention if self.mixer_name is None else self.mixer_name
        mixer = f"{prefix}.{mixer}" if mixer else prefix
        specs = {name: self.norm.specs(f"{prefix}.{getattr(names, name)}", self.hidden_size) for name in self.norms}
        specs["attention"] = self.mixer.specs(mixer, self.hidden_size, names)
        if self.feed_forward is not None:
            mlp = f"{prefix}.{names.mlp}" if names.mlp else prefix
            specs["mlp"] = self.feed_forward.specs(mlp, self.hidden_size, names)
        if self.layer_input is not None:
            specs["layer_input"] = self.layer_input.specs(prefix, self.hidden_size)
            specs["layer_input_norm"] = self.norm.specs(f"{prefix}.post_per_layer_input_norm", self.hidden_size)
        if self.laurel is not None:
            specs["laurel"] = self.laurel.specs(prefix, self.hidden_size)
        if self.streams is not None:
            specs["streams"] = self.streams.specs(prefix, self.hidden_size)
        if self.has_scalar:
            specs["scalar"] = ParamSpec(shape=(1,), axes=(None,), source=(f"{prefix}.layer_scalar",), init_scale=None)
        return specs

    @property
    def adds_in_first_norm(self) -> bool:
        """True if the layer begins with `Norm.of_sum` of the residual stream and the update of the layer before."""
        is_known = self.arrangement in (Arrangement.SEQUENTIAL, Arrangement.PARALLEL) and self.streams is None
        return is_known and "attention_norm" in self.norms

    @property
    def why_not_fused(self) -> str | None:
        """Why no kernel has the layer's matmuls together with the norms and additions around them, or None if some
        do.
        """
        if self.arrangement != Arrangement.SEQUENTIAL:
            return f"the layer has {self.arrangement}"
        if self.streams is not None:
            return "the layer has several residual streams"
        if self.laurel is not None:
            return "the layer has a branch beside the attention"
        if self.norm.kind != "rms":
            return "the layer has layer norms"
        if self.norms != PRE_NORMS:
            return "the layer has norms after blocks"
        if self.update_scale != 1.0:
            return "the layer has scaled updates"
        if self.layer_input is not None or self.has_scalar:
            return "the layer has a third block or a factor"
        if self.feed_forward is None:
            return "the layer has no feed-forward"
        return self.mixer.why_not_fused or self.feed_forward.why_not_fused

    @property
    def stream_size(self) -> int:
        """Number of values that the layers before and after it pass on for a token."""
        return self.hidden_size * (1 if self.streams is None else self.streams.num_streams)

    def run(
        self, params: Params, x: Float[Array, "T S"], update: Any, step: LayerStep, *, consumer: Consumer
    ) -> tuple[Array, Any, Any]:
        """Run the layer on a residual stream [T, E] to which an update is still to be added, None if there is none, or
        on several streams, as `AltUp` has them.

        Returns the stream, the update that is to be added to it next, in a form that `consumer` takes, and the updated
        LayerCache. An update is added where the sum is normalised, so that both can be one kernel.
        """
        arguments = params, x, update, step
        match self.arrangement:
            case Arrangement.SEQUENTIAL if self.streams is not None:
                return self._on_one_of_several(self.streams, *arguments)
            case Arrangement.SEQUENTIAL:
                return self._sequential(*arguments, consumer)
            case Arrangement.PARALLEL:
                return self._parallel(*arguments)
            case Arrangement.NORMED_INPUTS:
                return self._normed_inputs(*arguments)
            case Arrangement.NORMED_SUMS:
                return self._normed_sums(*arguments)

    def _sequential(
        self, params: Params, x: Array, update: Any, step: LayerStep, consumer: Consumer
    ) -> tuple[Array, Any, Any]:
        batch = step.batch
        x, update, cache = self._two_blocks(params, x, update, step, consumer)
        if self.layer_input is not None:
            x = add_update(x, update, batch.context)
            y = self.layer_input.run(params["layer_input"], x, batch)
            update = PendingUpdate(value=y, weights=params["layer_input_norm"], norm=self.norm, scale=1.0)
        if self.has_scalar:
            return add_update(x, update, batch.context) * params["scalar"][None], None, cache
        return x, update, cache

    def _on_one_of_several(
        self, streams: AltUp, params: Params, x: Array, update: None, step: LayerStep
    ) -> tuple[Array, None, Any]:
        """Run the blocks on the active stream."""
        assert self.layer_input is not None
        assert update is None
        own, batch, context = params["streams"], step.batch, step.batch.context
        predicted = streams.predict(own, x, context)
        active, update_of_active, cache = self._two_blocks(params, predicted[:, streams.active], None, step, "stream")
        corrected = streams.correct(own, predicted, add_update(active, update_of_active, context), context)
        y = self.layer_input.run(params["layer_input"], streams.gate_input(own, corrected), batch)
        y = self.norm.alone(y, params, "layer_input_norm", context)
        return streams.joined(own, corrected, y, context), None, cache

    def _two_blocks(
        self, params: Params, x: Array, update: Any, step: LayerStep, consumer: Consumer
    ) -> tuple[Array, Any, Any]:
        """Run the mixer and then the feed-forward, if there is one."""
        batch = step.batch

        def add(x: Array, update: Any, name: str, reader: Weight | None) -> tuple[Array, Any]:
            if name not in self.norms:
                x = add_update(x, update, batch.context)
                return x, x
            return self.norm.of_sum(x, update, params[name], batch.context, name, reader=reader)

        reader = self.mixer.reader(params["attention"]) if self.laurel is None else None
        x, y = add(x, update, "attention_norm", reader)
        if self.feed_forward is None:
            consumer = self.consumer_of_mlp(consumer)
            update, cache = self.mixer.run(params["attention"], y, step, consumer=consumer)
            return x, self._pending(update, params), cache
        consumer_of_attention = self.consumer_of_attention
        update, cache = self.mixer.run(params["attention"], y, step, consumer=consumer_of_attention)
        update = self._pending(update, params, "attention_post_norm")
        if self.laurel is not None:
            x = add_update(x, update, batch.context) + self.laurel.run(params["laurel"], y, batch.context)
            x, update = scaled(x, 2**-0.5), None
        x, y = add(x, update, "mlp_norm", self.feed_forward.reader(params["mlp"]))
        update = self.feed_forward.run(params["mlp"], y, batch, consumer=self.consumer_of_mlp(consumer))
        return x, self._pending(update, params, "mlp_post_norm"), cache

    def _parallel(self, params: Params, x: Array, update: Any, step: LayerStep) -> tuple[Array, Any, Any]:
        assert self.feed_forward is not None
        batch = step.batch
        x, y = self.norm.of_sum(x, update, params["attention_norm"], batch.context, "attention_norm")
        update, cache = self.mixer.run(params["attention"], y, step, consumer="stream")
        if "mlp_norm" in self.norms:
            y = self.norm.alone(x, params, "mlp_norm", batch.context)
        update = update + self.feed_forward.run(params["mlp"], y, batch, consumer="stream")
        return x, self._pending(update, params), cache

    def _normed_inputs(self, params: Params, x: Array, update: Any, step: LayerStep) -> tuple[Array, Array, Any]:
        """Add each update to its own input, the norm of the residual stream, as BLOOM may."""
        assert self.feed_forward is not None
        batch = step.batch
        x = self.norm.alone(add_update(x, update, batch.context), params, "attention_norm", batch.context)
        update, cache = self.mixer.run(params["attention"], x, step, consumer="stream")
        x = self.norm.alone(x + update, params, "mlp_norm", batch.context)
        return x, self.feed_forward.run(params["mlp"], x, batch, consumer="stream"), cache

    def _normed_sums(self, params: Params, x: Array, update: Any, step: LayerStep) -> tuple[Array, None, Any]:
        """Normalise the residual stream after each update."""
        assert self.feed_forward is not None
        batch = step.batch
        x = add_update(x, update, batch.context)
        update, cache = self.mixer.run(params["attention"], x, step, consumer="stream")
        x = self.norm.alone(x + update, params, "attention_norm", batch.context)
        update = self.feed_forward.run(params["mlp"], x, batch, consumer="stream")
        return self.norm.alone(x + update, params, "mlp_norm", batch.context), None, cache

    def _pending(self, update: Any, params: Params, post_norm: str | None = None) -> Any:
        """Return the update of a block with what is still to be done before it is added to the residual stream."""
        weights = params[post_norm] if post_norm in self.norms else None
        if weights is None and self.update_scale == 1.0:
            return update
        norm = None if weights is None else self.norm
        return PendingUpdate(value=update, weights=weights, norm=norm, scale=self.update_scale, name=post_norm)

    @property
    def consumer_of_attention(self) -> Consumer:
        """What takes the update of the attention."""
        is_normed = self.laurel is None and "mlp_norm" in self.norms
        return "norm" if is_normed and self._adds_parts("attention_post_norm") else "stream"

    def consumer_of_mlp(self, consumer: Consumer) -> Consumer:
        """Return what takes the update of the feed-forward if the layer's update has this consumer."""
        is_last = self.layer_input is None and not self.has_scalar
        return consumer if is_last and self._adds_parts("mlp_post_norm") else "stream"

    def _adds_parts(self, post_norm: str) -> bool:
        """Return true if a block's update is added as it is, by a norm of the kind that adds up parts of one."""
        sequential = self.arrangement == Arrangement.SEQUENTIAL
        return sequential and self.norm.kind == "rms" and post_norm not in self.norms and self.update_scale == 1.0
