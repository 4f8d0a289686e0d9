"""Which programs steps may run in while others are still being compiled, and which requests that is enough for."""

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxserve.execution.programs.kinds import AdmitExtras, Program
from jaxserve.execution.programs.shapes import StepNeeds, StepShapes
from jaxserve.request import EngineRequest
from jaxserve.sampling.features import features, has_extras


class Needs(NamedTuple):
    """What requests need of programs."""

    features: int = 0
    """Bits of `Feature`."""
    has_prompt_logprobs: bool = False
    has_extras: bool = False
    has_masks: bool = False

    @classmethod
    def of(cls, requests: Sequence[EngineRequest]) -> "Needs":
        """Return what these need together."""
        return cls(
            functools.reduce(operator.or_, map(features, requests), 0),
            any(request.params.prompt_logprobs is not None for request in requests),
            any(map(has_extras, requests)),
            any(bool(request.grammar) for request in requests),
        )

    def union(self, other: "Needs") -> "Needs":
        """Return what both need."""
        return Needs(
            self.features | other.features,
            self.has_prompt_logprobs or other.has_prompt_logprobs,
            self.has_extras or other.has_extras,
            self.has_masks or other.has_masks,
        )


class Readiness:
    """The programs of an engine that is warming up. From any thread."""

    def __init__(self, shapes: StepShapes, ready: Iterable[Program]):
        self._shapes = shapes
        self._ready = set(ready)
        self._failed: set[Program] = set()
        self.version = 0
        """How many programs have become ready, or have failed."""

    def add(self, program: Program) -> None:
        """Let steps use a program."""
        self._ready.add(program)
        self.version += 1

    def fail(self, program: Program) -> None:
        """Give up a program."""
        self._failed.add(program)
        self.version += 1

    def is_ready(self, program: Program) -> bool:
        """Return true if steps may use a program."""
        return program in self._ready

    def max_tokens(self, needs: Needs) -> int:
        """Return how many tokens a step may have whose rows need no more than `needs`; 0 if there is no such step."""
        return max((size for size, programs in self._ways(needs) if all(map(self.is_ready, programs))), default=0)

    def is_hopeless(self, needs: Needs) -> bool:
        """Return true if too many programs have failed for rows with these needs."""
        return not any(self._failed.isdisjoint(programs) for _, programs in self._ways(needs))

    def missing(self, needs: Needs) -> list[Program]:
        """Return the fewest programs that would make such a request ready."""
        sets = [
            [program for program in programs if not self.is_ready(program)]
            for _, programs in self._ways(needs)
            if self._failed.isdisjoint(programs)
        ]
        return min(sets, key=len, default=[])

    def _ways(self, needs: Needs) -> Iterable[tuple[int, list[Program]]]:
        """Yield numbers of tokens, and the programs with which steps of as many run."""
        largest_mask: list[Program] = [self._shapes.masks_for(self._shapes.largest.bucket.num_rows)]
        of_slots = [AdmitExtras()] * needs.has_extras + largest_mask * needs.has_masks
        of_rows = StepNeeds.of(needs.features, has_prompt_logprobs=needs.has_prompt_logprobs)
        for step in self._shapes.steps_of_any(of_rows):
            yield step.forward.bucket.num_tokens, [*step.programs, *of_slots]
