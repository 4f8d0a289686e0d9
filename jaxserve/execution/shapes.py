"""Which steps are compiled, and which of them runs a plan: buckets of tokens, and kinds of what rows need.

On a GPU a branch whose body sorts or loops would break the step's command buffer and make the host wait for the device,
and a kernel that finds nothing to do still has to be launched: so there are kinds. Up to some 256 tokens a step is
bound by reading the weights; so a kind that few steps are of needs few sizes, and none has to be small.
"""

from collections.abc import Iterator
from typing import NamedTuple

from jaxserve.execution.batch import Bucket

SMALLEST_GENERAL = 16
"""Tokens of the smallest decode step that can do more than draw from filtered distributions."""

MIXED = (64, 256)
"""Tokens of the smaller steps in which rows may have several tokens; above them there are all buckets."""


class StepKey(NamedTuple):
    """What distinguishes one compiled step from another: the bucket, and arguments of `step.step`."""

    bucket: Bucket
    is_plain: bool
    is_decode_only: bool
    has_logprobs: bool


class Kind(NamedTuple):
    """What a step can do: all but its size."""

    is_plain: bool
    is_decode_only: bool
    has_logprobs: bool


PLAIN_DECODE = Kind(is_plain=True, is_decode_only=True, has_logprobs=False)
DECODE = Kind(is_plain=False, is_decode_only=True, has_logprobs=False)
PREFILL = Kind(is_plain=False, is_decode_only=False, has_logprobs=False)
ANYTHING = Kind(is_plain=False, is_decode_only=False, has_logprobs=True)


class StepShapes:
    """The compiled steps of a runner. Without `has_special_steps` every bucket has one that can do anything: on a CPU
    branches and loops not taken cost nothing.
    """

    def __init__(self, buckets: list[Bucket], *, has_special_steps: bool):
        if not has_special_steps:
            self._sizes = {ANYTHING: buckets}
            return
        square = [bucket for bucket in buckets if bucket.num_rows == bucket.num_tokens]
        mixed = [
            bucket
            for bucket in buckets
            if bucket.num_tokens in MIXED or bucket.num_tokens > MIXED[-1] or bucket is buckets[-1]
        ]
        general = [bucket for bucket in square if bucket.num_tokens >= SMALLEST_GENERAL] or square[-1:]
        self._sizes = {
            PREFILL: mixed,
            ANYTHING: list(_sparse(mixed)),
            PLAIN_DECODE: square,
            DECODE: list(_sparse(general)),
        }

    @property
    def keys(self) -> list[StepKey]:
        """Every step that a plan can ask for, the longest to compile first."""
        keys = [StepKey(bucket, *kind) for kind, buckets in self._sizes.items() for bucket in buckets]
        return sorted(keys, key=lambda key: -key.bucket.num_tokens)

    @property
    def largest(self) -> StepKey:
        """The step that needs the most memory."""
        return StepKey(self._sizes[ANYTHING][-1], *ANYTHING)

    def key_for(self, num_tokens: int, *, is_plain: bool, is_decode_only: bool, has_logprobs: bool) -> StepKey:
        """The smallest step for so many tokens, at most those of the largest bucket, that can do what rows need.

        `is_plain`: they need no more than draws from filtered distributions. `is_decode_only`: each has one token.
        """
        for kind in (PLAIN_DECODE, DECODE, PREFILL):
            if (has_logprobs, kind.is_plain > is_plain, kind.is_decode_only > is_decode_only) == (False,) * 3:
                for bucket in self._sizes.get(kind, ()):
                    if bucket.num_tokens >= num_tokens:
                        return StepKey(bucket, *kind)
        return StepKey(next(bucket for bucket in self._sizes[ANYTHING] if bucket.num_tokens >= num_tokens), *ANYTHING)


def _sparse(buckets: list[Bucket]) -> Iterator[Bucket]:
    """Buckets in steps of four, the smallest and the largest among them."""
    size = 0
    for bucket in buckets:
        if bucket.num_tokens >= 4 * size or bucket is buckets[-1]:
            size = bucket.num_tokens
            yield bucket
