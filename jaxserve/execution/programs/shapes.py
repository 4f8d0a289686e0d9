"""Which programs are compiled, and which of them run a plan: buckets of tokens, and what rows need.

On a GPU a branch whose body sorts or loops would break a program's command buffer and make the host wait for the
device, and a kernel that finds nothing to do still has to be launched: so what few rows need is apart. Up to some 256
tokens a step is bound by reading the weights; so a program that few steps run needs few sizes, and none has to be
small. Beyond, a step takes as long as it has tokens, those of padding included; so the sizes of forward passes that
many steps run lie closer.
"""

from collections.abc import Iterator
from typing import NamedTuple

from jaxserve.execution.batch import Bucket
from jaxserve.execution.programs.kinds import (
    Admit,
    AdmitExtras,
    Allow,
    Draw,
    Embed,
    Forward,
    PlainDecode,
    Program,
    PromptLogprobs,
)

SMALLEST_GENERAL = 16
"""Tokens of the smallest forward pass of decode steps that do more than draw from filtered distributions."""

MIXED = (64, 128, 256)
"""Tokens of the smaller forward passes in which rows may have several tokens. Above them there are all buckets, except
those between powers of two that have fewer rows than there may be: they would need a draw of their own.
"""


class Step(NamedTuple):
    """The programs of one step, in the order in which they run. Without a `draw` the first one draws too."""

    forward: PlainDecode | Forward
    draw: Draw | None = None
    prompt_logprobs: PromptLogprobs | None = None
    embed: Embed | None = None


class StepShapes:
    """The compiled programs of a runner. Without `has_lean_programs` there is one forward pass a bucket and one draw a
    number of rows, for steps of all kinds: on a CPU branches and loops not taken cost nothing.
    """

    def __init__(self, buckets: list[Bucket], *, has_lean_programs: bool):
        self._has_lean_programs = has_lean_programs
        max_num_rows = buckets[-1].num_rows
        self._masks = [Allow(size) for size in (1, 8, 64) if size < max_num_rows] + [Allow(max_num_rows)]
        self._plain: list[Bucket] = []
        self._decode: list[Bucket] = []
        self._mixed = self._with_hidden = buckets
        if has_lean_programs:
            self._plain = [bucket for bucket in buckets if bucket.num_rows == bucket.num_tokens]
            general = [bucket for bucket in self._plain if bucket.num_tokens >= SMALLEST_GENERAL] or self._plain[-1:]
            self._decode = list(_sparse(general))
            # Between powers of two, those with fewer rows than there may be are for plain decode, which draws itself.
            mixed = [
                bucket
                for bucket in buckets
                if bucket.num_tokens.bit_count() == 1 or bucket.num_rows == buckets[-1].num_rows
            ]
            self._mixed = [
                bucket
                for bucket in mixed
                if bucket.num_tokens in MIXED or bucket.num_tokens > MIXED[-1] or bucket is buckets[-1]
            ]
            self._with_hidden = list(_sparse(self._mixed))

    @property
    def programs(self) -> list[Program]:
        """Every program that a plan can ask for, those with layers first, and of these the longest to compile."""
        plain = [PlainDecode(bucket) for bucket in self._plain]
        decode = [Forward(bucket, is_decode_only=True) for bucket in self._decode]
        mixed = [Forward(bucket, is_decode_only=False) for bucket in self._mixed]
        num_rows = sorted({forward.bucket.num_rows for forward in decode + mixed}, reverse=True)
        with_layers: list[PlainDecode | Forward] = [*mixed, *plain, *decode]
        with_layers.sort(key=lambda program: -program.bucket.num_tokens)
        return [
            *with_layers,
            *map(PromptLogprobs, reversed(self._with_hidden)),
            *map(Embed, reversed(self._with_hidden)),
            *dict.fromkeys(self._draw(size, has_logprobs) for size in num_rows for has_logprobs in (True, False)),
            Admit(),
            AdmitExtras(),
            *self._masks,
        ]

    @property
    def largest(self) -> Forward:
        """The forward pass that needs the most memory."""
        return Forward(self._mixed[-1], is_decode_only=False)

    def step_for(
        self,
        num_tokens: int,
        *,
        is_plain: bool,
        is_decode_only: bool,
        has_logprobs: bool,
        has_prompt_logprobs: bool,
        has_embeddings: bool,
    ) -> Step:
        """The smallest step for so many tokens, at most those of the largest bucket, that can do what rows need.

        `is_plain`: they need no more than draws from filtered distributions, which have no log probabilities.
        `is_decode_only`: each has one token. `has_logprobs`: of drawn tokens.
        """
        needs_hidden = has_prompt_logprobs or has_embeddings
        is_decode_only = is_decode_only and not needs_hidden
        if is_plain and is_decode_only and (bucket := _smallest(self._plain, num_tokens)):
            return Step(PlainDecode(bucket))
        if is_decode_only and (bucket := _smallest(self._decode, num_tokens)):
            return Step(Forward(bucket, is_decode_only=True), self._draw(bucket.num_rows, has_logprobs))
        bucket = _smallest(self._with_hidden if needs_hidden else self._mixed, num_tokens)
        assert bucket is not None
        return Step(
            Forward(bucket, is_decode_only=False),
            self._draw(bucket.num_rows, has_logprobs),
            PromptLogprobs(bucket) if has_prompt_logprobs else None,
            Embed(bucket) if has_embeddings else None,
        )

    def masks_for(self, num_rows: int) -> Allow:
        """Return the program that writes the masks of so many rows."""
        return next(masks for masks in self._masks if masks.num_rows >= num_rows)

    def _draw(self, num_rows: int, has_logprobs: bool) -> Draw:
        return Draw(num_rows, has_logprobs=has_logprobs or not self._has_lean_programs)


def _smallest(buckets: list[Bucket], num_tokens: int) -> Bucket | None:
    return next((bucket for bucket in buckets if bucket.num_tokens >= num_tokens), None)


def _sparse(buckets: list[Bucket]) -> Iterator[Bucket]:
    """Buckets in steps of four, the smallest and the largest among them."""
    size = 0
    for bucket in buckets:
        if bucket.num_tokens >= 4 * size or bucket is buckets[-1]:
            size = bucket.num_tokens
            yield bucket
