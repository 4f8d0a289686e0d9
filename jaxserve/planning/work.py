"""What a step must do, whatever runs it: bytes to read, products to compute, sums to send; and how long that takes a
GPU at the rates that programs reach, one after the other.
"""

import math
from typing import Any, NamedTuple

import jax

from jaxserve.engine.checkpoint import Checkpoint
from jaxserve.engine.client import EngineInfo
from jaxserve.execution.programs.model import StepModel
from jaxserve.gpus import Gpu
from jaxserve.layers.layouts import num_bytes
from jaxserve.layers.params import Params
from jaxserve.layers.stages import Stage

MAX_ROWS_IN_16_BITS = 32
"""Most tokens that matrix products of 8-bit weights multiply as 16-bit floats, where activations may be rounded."""

SUM_LATENCY = 11e-6
"""Seconds that GPUs of one host take to add up partial sums of a few rows: two H200s, one row of Llama 3 8B and 70B."""

HOP_LATENCY = 20e-6
"""Seconds from the end of a stage to the begin of the next one on other devices, besides the bytes; assumed."""

SUMS_PER_LAYER = 2
"""Partial sums of a layer that is split over devices: after attention, and after the MLP."""


WHOLE = Stage()
"""The only stage of a model without a pipeline."""


class Model(NamedTuple):
    """The sizes of a model that decide how much work a step is."""

    num_layers: int
    hidden_size: int
    itemsize: int
    """Bytes of an activation."""
    layer_parameters: float
    """Parameters of the layers that a token is multiplied by: of experts those that it is routed to."""
    head_parameters: int
    """Those of the LM head, which multiplies the last token of each row."""
    head_bytes: int
    """Bytes of the LM head, on all devices together."""
    attention_widths: tuple[tuple[int | None, float], ...]
    """For each window, None for none, the values of all query heads of a token in the layers that attend within it; 0
    if unknown.
    """
    rounds_activations: bool
    """True if products of many rows are of 8-bit values."""
    num_experts: int
    """Experts of a layer, 0 if it has none."""
    expert_devices: int
    """Number of devices that have whole experts, 1 if each has a shard of every expert."""

    @classmethod
    def read(cls, checkpoint: Checkpoint, model: StepModel, held: Params) -> "Model":
        """Return the sizes of a checkpoint's model whose weights are `held` in some form."""
        specs: Params = checkpoint.family.param_specs(checkpoint.model_config)
        routing = getattr(checkpoint.model_config, "routing", None)
        chosen = 1.0 if routing is None else routing.num_experts_per_token / routing.num_experts

        def parameters(tree: Any) -> float:
            sizes = (
                math.prod(spec.shape) * (chosen if "experts" in spec.axes else 1.0) for spec in jax.tree.leaves(tree)
            )
            return sum(sizes)

        head = specs.get("lm_head", specs.get("embed"))
        schemes = [scheme for spec in jax.tree.leaves(held) if (scheme := getattr(spec, "scheme", None)) is not None]
        return cls(
            num_layers=len(specs["layers"]),
            hidden_size=model.hidden_size,
            itemsize=model.dtype.itemsize,
            layer_parameters=parameters(specs["layers"]),
            head_parameters=int(parameters(head)),
            head_bytes=num_bytes({"head": held.get("lm_head", held.get("embed"))}, dtype=model.dtype),
            attention_widths=tuple(
                (window, float(num_layers * _attention_width(checkpoint.fields)))
                for window, num_layers in model.layout.layers_by_window.items()
            ),
            rounds_activations=any(scheme.rounds_activations is not None for scheme in schemes),
            num_experts=0 if routing is None else routing.num_experts,
            expert_devices=model.mesh.shape.get("expert", 1),
        )

    def part(self, stage: Stage) -> "Model":
        """Return the sizes of the layers of one stage, and of the head if it is the last one."""
        num_layers = len(stage.span(self.num_layers))
        share = num_layers / self.num_layers
        return self._replace(
            num_layers=num_layers,
            layer_parameters=self.layer_parameters * share,
            head_parameters=self.head_parameters * stage.is_last,
            attention_widths=tuple((window, width * share) for window, width in self.attention_widths),
        )

    def attention_products(self, start: float, length: float) -> float:
        """Return the multiplications and additions of attention for `length` tokens of a text after `start` others."""
        end = start + length
        return 4.0 * sum(width * (_attended(end, w) - _attended(start, w)) for w, width in self.attention_widths)

    def bytes_of(self, stage: Stage, num_bytes: float) -> float:
        """Return a stage's part of the bytes that all stages read in a step."""
        share = len(stage.span(self.num_layers)) / self.num_layers
        return (num_bytes - self.head_bytes) * share + self.head_bytes * stage.is_last


class Work(NamedTuple):
    """What one step does, on all devices together."""

    num_bytes: float
    products: float
    """Multiplications, with their additions, times two."""
    in_8_bits: bool
    sums: int
    """Partial sums of all rows that are added up over devices."""
    bytes_per_sum: float

    def seconds(self, gpu: Gpu, *, num_devices: int) -> float:
        """Return the sum of the times of all parts: reading and computing do not overlap much in a layer, whose
        parts are one or the other. A roofline, as `inspect.Roofline` is, would be the longest of them.
        """
        time = self.num_bytes / (gpu.sustained_bandwidth * num_devices)
        time += self.products / (gpu.sustained_flops(in_8_bits=self.in_8_bits) * num_devices)
        if num_devices > 1:
            sent = 2 * (num_devices - 1) / num_devices * self.bytes_per_sum
            time += self.sums * (SUM_LATENCY + sent / gpu.peer_bandwidth)
        return time


def decode_work(model: Model, info: EngineInfo, *, num_rows: int, context: float, stage: Stage = WHOLE) -> Work:
    """Return the work of a stage in a step of `num_rows` rows with one token each, at this mean length of their
    contexts.
    """
    part = model.part(stage)
    products = 2.0 * num_rows * (part.layer_parameters + part.head_parameters)
    products += num_rows * part.attention_products(context, 1)
    read = info.step_bytes(num_rows, context=context) + _waited_for(model, info, num_tokens=num_rows)
    num_bytes = model.bytes_of(stage, read)
    return _work(part, num_bytes, products, num_tokens=num_rows)


def prefill_work(model: Model, info: EngineInfo, *, num_rows: int, length: int, stage: Stage = WHOLE) -> Work:
    """Return the work of a stage for `num_rows` prompts of equal length, in steps of the engine's token budget."""
    part = model.part(stage)
    num_tokens = num_rows * length
    num_steps = num_prefill_steps(info, num_tokens)
    num_tokens_of_step = min(num_tokens, info.max_num_batched_tokens)
    read = info.expected_weight_bytes(num_tokens_of_step)
    read += _waited_for(model, info, num_tokens=num_tokens_of_step)
    products = 2.0 * num_tokens * part.layer_parameters + 2.0 * num_rows * part.head_parameters
    products += num_rows * part.attention_products(0, length)
    num_bytes = num_steps * model.bytes_of(stage, read)
    work = _work(part, num_bytes, products, num_tokens=num_tokens_of_step)
    return work._replace(sums=work.sums * num_steps)


def num_prefill_steps(info: EngineInfo, num_tokens: int) -> int:
    """Return in how many steps so many prompt tokens are computed."""
    return math.ceil(num_tokens / info.max_num_batched_tokens)


def _work(model: Model, num_bytes: float, products: float, *, num_tokens: int) -> Work:
    return Work(
        num_bytes=num_bytes,
        products=products,
        in_8_bits=model.rounds_activations and num_tokens > MAX_ROWS_IN_16_BITS,
        sums=SUMS_PER_LAYER * model.num_layers,
        bytes_per_sum=float(num_tokens * model.hidden_size * model.itemsize),
    )


def _waited_for(model: Model, info: EngineInfo, *, num_tokens: int) -> float:
    """Return the bytes that other devices could read while the busiest one reads its whole experts, if tokens choose
    experts at random.

    It has more than the mean by sqrt(2 log(devices)) standard deviations, the expected maximum of as many normals.
    """
    if model.expert_devices == 1 or not model.num_experts:
        return 0.0
    read = 1 - (1 - info.expert_fraction) ** num_tokens
    deviation = math.sqrt(read * (1 - read) * model.expert_devices / model.num_experts)
    return info.expert_bytes * min(1 - read, math.sqrt(2 * math.log(model.expert_devices)) * deviation)


def _attended(num_tokens: float, window: int | None) -> float:
    """Return how many tokens the tokens of a text attend to, all together, each to those of its window."""
    within = num_tokens if window is None else min(num_tokens, window)
    return within * within / 2 + (num_tokens - within) * within


def _attention_width(fields: dict[str, Any]) -> int:
    """Return the values of a layer's query heads by a config.json, 0 if its family names them otherwise."""
    heads = fields.get("num_attention_heads") or 0
    width = fields.get("head_dim") or (fields.get("hidden_size") or 0) // (heads or 1)
    return heads * width
