"""ParamSpec, the keystone: one declaration a weight, from which everything else about it follows.

From a family's `param_specs(config)` tree come the abstract tree, random initialisation, shardings, the names to read
from a Hugging Face checkpoint, the targets of quantization and the Orbax restore target.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

Transform = Callable[..., np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One weight: its shape, the logical name of each axis, and where it comes from.

    `axes` are logical names ("embed", "heads", "kv_heads", "ffn", "vocab", or None), mapped to mesh axes by
    `layers.sharding`. `source` are the Hugging Face tensor names it is made of; `transform` takes these tensors, in
    order, as NumPy arrays and returns the weight (default: the one tensor, unchanged). `dtype` None means the dtype
    that the engine serves in. `quantize` marks the weights that a quantization format replaces. `init_scale` is the
    standard deviation of random initialisation, None for ones (norms), 0.0 for zeros (biases).
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    source: tuple[str, ...]
    transform: Transform | None = None
    dtype: Any = None
    quantize: bool = False
    init_scale: float | None = 0.02

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"{self.source}: shape {self.shape} and axes {self.axes} differ in rank")
