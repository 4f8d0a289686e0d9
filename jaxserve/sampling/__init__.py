"""From the logits of a step's sampled rows to their next tokens: pure functions over per-slot device state.

`features` says what a request needs, `state` holds its parameters and history on the device, `processors` change the
logits, `sampler` draws the token and records it, `logprobs` reports.
"""

from jaxserve.sampling.features import Feature, features, has_extras
from jaxserve.sampling.logprobs import logprobs_at, token_logprobs
from jaxserve.sampling.sampler import SampledTokens, record, sample
from jaxserve.sampling.state import (
    NUM_SCALARS,
    Extras,
    SamplingState,
    admit,
    admit_extras,
    init_state,
    pack_extras,
    pack_scalars,
)

__all__ = [
    "NUM_SCALARS",
    "Extras",
    "Feature",
    "SampledTokens",
    "SamplingState",
    "admit",
    "admit_extras",
    "features",
    "has_extras",
    "init_state",
    "logprobs_at",
    "pack_extras",
    "pack_scalars",
    "record",
    "sample",
    "token_logprobs",
]
