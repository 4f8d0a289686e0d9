"""What compiled programs need of a device's memory: for the runner, and for plans of devices that are not there."""

from collections.abc import Mapping
from typing import NamedTuple

import jax

from jaxserve.execution.programs.kinds import Begin, Finish, Forward, PlainDecode, Program, RunStage


class ProgramMemory(NamedTuple):
    """Bytes that a program needs per device besides its arguments."""

    made: int
    """Results that take the place of no argument."""
    temporary: int


def memory_of(compiled: jax.stages.Compiled) -> ProgramMemory:
    """Return what a program needs, as its compiler says."""
    memory = compiled.memory_analysis()
    assert memory is not None
    return ProgramMemory(
        made=memory.output_size_in_bytes - memory.alias_size_in_bytes, temporary=memory.temp_size_in_bytes
    )


def memory_of_step(compiled: Mapping[Program, jax.stages.Compiled], *, state_bytes: int) -> int:
    """Return the bytes that steps need per device besides weights and KV: `state_bytes` for slots and peers' rows, and
    what the largest one allocates, whose programs, of one stage, are `compiled`.
    """
    passes = (PlainDecode, Forward, RunStage, Begin, Finish)
    forward = [memory_of(each) for program, each in compiled.items() if isinstance(program, passes)]
    others = [memory_of(each) for program, each in compiled.items() if not isinstance(program, passes)]
    # Logits and hidden states are there until the others have run, one after the other.
    used = max([program.temporary for program in forward] + [rest.temporary + rest.made for rest in others])
    return state_bytes + sum(program.made for program in forward) + used
