"""What an engine serves and how: all that its start decides before a weight is loaded, for the lines after that. Only
those that decide see the options.
"""

import dataclasses
from typing import Literal

from jaxserve.config import WarmUp
from jaxserve.engine.checkpoint import Checkpoint
from jaxserve.engine.device import Devices
from jaxserve.execution.programs.builder import StepBuilder
from jaxserve.layers.params import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """The model, the devices, and the steps that run it there.

    Attributes:
        builder: builds the steps: dtype, kernels and sizes are in its spec.
        specs: the weights, in the form in which the devices hold them.
        weights_seed: makes random weights; None loads those of the checkpoint.
        tokenizer: where it is.
        kv_cache_memory: bytes; None fills the devices.
    """

    checkpoint: Checkpoint
    devices: Devices
    builder: StepBuilder
    specs: Params
    weights_seed: int | None
    tokenizer: str
    kv_cache_memory: int | None
    warmup: WarmUp
    scheduler: Literal["continuous", "static"]
    scheduling_policy: Literal["fcfs", "priority"]
    enable_prefix_caching: bool
