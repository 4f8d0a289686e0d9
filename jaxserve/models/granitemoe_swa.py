"""Granite with windows and experts (Granite Team 2026, huggingface.co/ibm-granite/granite-swash-3b-a600m)."""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.layer import Layer
from jaxserve.layers.names import ExpertNames
from jaxserve.models import granite_swa, granitemoe

DEFAULTS: dict[str, Any] = granitemoe.DEFAULTS | {"sliding_window": 128}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(granitemoe.Config):
    """The shape of one Granite with windows and experts; the fields are those of `granite_swa.Config`, too."""

    sliding_windows: tuple[int | None, ...]
    thetas: tuple[float | None, ...]


def _read(fields: dict[str, Any]) -> Config:
    return granitemoe.read(Config, fields, **granite_swa.read_layers(fields))


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    return granite_swa.with_sinks(config, granitemoe.layers(config))


NAMES = replace(
    granitemoe.NAMES,
    experts=ExpertNames(
        router="block_sparse_moe.router",
        experts="block_sparse_moe.experts",
        shared="shared_mlp",
        of_shared=("input_linear", "input_linear", "output_linear"),
    ),
)
FAMILY = replace(
    granitemoe.FAMILY,
    Config=Config,
    defaults=DEFAULTS,
    read=_read,
    layers=layers,
    names=NAMES,
    doc=__doc__,
    features=("sinks",),
)
