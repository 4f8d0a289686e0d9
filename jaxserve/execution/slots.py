"""Slots: what the device remembers of each running request between steps.

A request holds one slot from admission until it finishes or is preempted. Admission writes its whole row (block table,
sampling parameters); each step then adds block ids and the token it has drawn, so that the next step needs no token
from the host.
"""

import dataclasses
from typing import no_type_check

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxserve.request import Request
from jaxserve.sampling import state as sampling_state
from jaxserve.sampling.state import SamplingState

ADMISSION_ROWS = 8
"""Rows that one admission upload carries; padding rows have an out-of-range slot."""


@no_type_check
@flax.struct.dataclass
class Slots:
    """Device state of N slots, M blocks each; donated."""

    last_tokens: Int[Array, " N"]
    block_tables: Int[Array, "N M"]
    sampling: SamplingState


def init_slots(*, num_slots: int, max_blocks: int, vocab_size: int) -> Slots:
    """Empty slots."""
    return Slots(
        last_tokens=jnp.zeros(num_slots, jnp.int32),
        block_tables=jnp.zeros((num_slots, max_blocks), jnp.int32),
        sampling=sampling_state.init_state(num_slots, vocab_size),
    )


def pack_admissions(requests: list[Request], *, num_slots: int, max_blocks: int) -> np.ndarray:
    """One upload for up to ADMISSION_ROWS requests that have just got a slot: [rows, 1 + M + scalars] int32."""
    packed = np.zeros((ADMISSION_ROWS, 1 + max_blocks + sampling_state.NUM_SCALARS), np.int32)
    packed[:, 0] = num_slots
    for row, request in zip(packed, requests, strict=False):
        row[0] = request.slot
        row[1 : 1 + len(request.block_ids)] = request.block_ids
        row[1 + max_blocks :] = sampling_state.pack_scalars(request.request)
    return packed


def admit(slots: Slots, packed: Int[Array, "rows width"]) -> Slots:
    """Write the rows of newly admitted requests. In graph, `slots` donated."""
    max_blocks = slots.block_tables.shape[1]
    slot_ids = packed[:, 0]
    return dataclasses.replace(
        slots,
        block_tables=slots.block_tables.at[slot_ids].set(packed[:, 1 : 1 + max_blocks], mode="drop"),
        sampling=sampling_state.admit(slots.sampling, slot_ids, packed[:, 1 + max_blocks :]),
    )
