"""Decides which programs are compiled, and which of them run a plan: buckets of tokens, and what rows need.

On a GPU a branch whose body sorts or loops would break a program's command buffer and make the host wait for the
device, and a kernel that finds nothing to do still has to be launched; so what only few rows need is in separate
programs. Up to some 256 tokens a step is bound by reading the weights, so a program that few steps run needs few sizes,
and no small ones. Beyond that, a step's time grows with its tokens, including padding; so the sizes of forward passes
that many steps run are closer together.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxserve.execution.batch import Bucket
from jaxserve.execution.programs.kinds import (
    Admit,
    AdmitExtras,
    AdmitTokens,
    Allow,
    Begin,
    Draw,
    Embed,
    Finish,
    Forward,
    KeepState,
    PlainDecode,
    Program,
    PromptLogprobs,
    ResumeState,
    RunStage,
    Settle,
)
from jaxserve.sampling.features import Feature

SMALLEST_GENERAL = 16
"""Tokens of the smallest forward pass of decode steps that do more than draw from filtered distributions."""

MIXED = (64, 128, 256)
"""Tokens of the smaller forward passes in which rows may have several tokens. Above them there are all buckets, except
those between powers of two that have fewer rows than there may be: they would need a draw of their own.
"""


MAX_TOKENS_IN_PROGRAMS = 512
"""Tokens of the largest forward pass of prompts that is launched as two programs: larger ones keep the GPU longer than
the host.
"""


class StepNeeds(NamedTuple):
    """What the rows of a step need of its programs; by default rows of any number of tokens that need nothing special.

    `is_plain`: no more than draws from filtered distributions, without log probabilities. `is_decode_only`: each row
    has one token. `has_logprobs`: log probabilities of sampled tokens. `has_masks`: some rows may follow a grammar,
    whose masks are written for each column.
    """

    is_plain: bool = True
    is_decode_only: bool = False
    has_logprobs: bool = False
    has_prompt_logprobs: bool = False
    has_embeddings: bool = False
    has_masks: bool = False

    @classmethod
    def of(cls, features: int, *, has_prompt_logprobs: bool, is_decode_only: bool = False) -> "StepNeeds":
        """Return the needs of rows with these bits of `Feature`."""
        return cls(
            is_plain=not features & ~Feature.PLAIN,
            is_decode_only=is_decode_only,
            has_logprobs=bool(features & Feature.LOGPROBS),
            has_prompt_logprobs=has_prompt_logprobs,
            has_embeddings=bool(features & Feature.POOLING),
            has_masks=bool(features & Feature.ALLOWED_TOKENS),
        )

    @property
    def has_hidden(self) -> bool:
        """True if hidden states of tokens that are not sampled from are read."""
        return self.has_prompt_logprobs or self.has_embeddings


PLAIN_DECODE = StepNeeds(is_decode_only=True)
"""The needs of rows of one token that need nothing special."""


class Step(NamedTuple):
    """The programs of one step, in the order in which they run. Without a `draw` the first one draws too."""

    forward: PlainDecode | Forward | Begin
    finish: Finish | None = None
    draw: Draw | None = None
    settle: Settle | None = None
    prompt_logprobs: PromptLogprobs | None = None
    embed: Embed | None = None
    stages: tuple[RunStage, ...] = ()
    """What earlier stages run before; all others are of the last stage."""

    @property
    def of_last_stage(self) -> list[Program]:
        """The programs of the last stage, or the only one."""
        programs = (self.forward, self.finish, self.draw, self.settle, self.prompt_logprobs, self.embed)
        return [program for program in programs if program is not None]

    @property
    def programs(self) -> list[Program]:
        """All programs."""
        return [*self.stages, *self.of_last_stage]


class Phase(NamedTuple):
    """Programs that are compiled together, and what for."""

    purpose: str
    programs: list[Program]
    is_first: bool = False
    """True if the engine takes no request before they are compiled."""
    is_urgent: bool = False
    """True if they are compiled at the same priority as requests run: they make steps larger, or requests wait."""

    def __str__(self) -> str:
        sizes: dict[str, list[str]] = {}
        for program in self.programs:
            sizes.setdefault(program.title, []).append(str(program.size or ""))
        names = "; ".join(f"{title} {', '.join(dict.fromkeys(of))}".rstrip() for title, of in sizes.items())
        return f"{'first' if self.is_first else 'then'}, for {self.purpose}: {names}"


class StepShapes:
    """The compiled programs of a runner. Without `has_lean_programs` there is one forward pass a bucket and one draw a
    number of rows, for steps of all kinds: on a CPU branches and loops not taken cost nothing.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        *,
        has_lean_programs: bool,
        may_be_two_programs: bool,
        verifying: Sequence[Bucket] = (),
        keeps_tokens: bool = False,
        num_stages: int = 1,
        has_states: bool = False,
        keeps_states: bool = False,
    ):
        """`may_be_two_programs`: forward passes of few tokens of prompts are launched so. `verifying` are the sizes of
        steps that verify drafts. `keeps_tokens`: a proposer must know the tokens of requests. `has_states`: layers
        keep states, and `keeps_states`: the prefix cache has copies of them.
        """
        self._has_states = has_states
        self._num_stages = num_stages
        self._copies: list[Program] = [KeepState(), ResumeState()] if keeps_states else []
        self._verifying = list(verifying)
        self._keeps_tokens = keeps_tokens
        # As for decode steps: what only some rows need is not worth many sizes.
        widths = {bucket.num_columns: None for bucket in self._verifying}
        of_widths = [[bucket for bucket in self._verifying if bucket.num_columns == width] for width in widths]
        self._verifying_general = self._verifying
        if has_lean_programs:
            self._verifying_general = [bucket for some in of_widths for bucket in _sparse(some)]
        # Without lean programs a single request decodes in a small forward pass.
        self._small = next((bucket for bucket in buckets if bucket.num_tokens >= SMALLEST_GENERAL), buckets[-1])
        self._max_tokens_of_two = MAX_TOKENS_IN_PROGRAMS if may_be_two_programs else 0
        self._has_lean_programs = has_lean_programs
        max_num_rows = buckets[-1].num_rows
        max_rows = {bucket.num_columns: bucket.num_rows for bucket in self._verifying} | {1: max_num_rows}
        self._masks = [
            Allow(size, width)
            for width, most in max_rows.items()
            for size in [*(size for size in (1, 8, 64) if size < most), most]
        ]
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
        """Every program that a plan can ask for, those with layers first, and of these the longest to compile first."""
        plain = [PlainDecode(bucket) for bucket in self._plain]
        decode = [Forward(bucket, is_decode_only=True) for bucket in self._decode]
        mixed = self._programs_of_prompts(self._mixed)
        num_rows = sorted({bucket.num_rows for bucket in self._decode + self._mixed}, reverse=True)
        verifying = self._programs_that_verify
        passes = [program for program in verifying if isinstance(program, PlainDecode | Forward)]
        with_layers: list[PlainDecode | Forward | Begin | Finish] = [*mixed, *plain, *decode, *passes]
        with_layers.sort(key=lambda program: -program.bucket.num_tokens)
        programs: list[Program] = [
            *with_layers,
            *map(PromptLogprobs, reversed(self._with_hidden)),
            *map(Embed, reversed(self._with_hidden)),
            *(draw for size in num_rows for draw in reversed(self._draws(size, has_logprobs=False))),
            *(program for program in verifying if isinstance(program, Draw | Settle)),
            Admit(),
            AdmitExtras(),
            *self._admits_tokens,
            *self._copies,
            *self._masks,
        ]
        return self._with_stages(programs)

    @property
    def largest(self) -> Forward:
        """The forward pass that needs the most memory, as one program."""
        return Forward(self._mixed[-1], is_decode_only=False)

    @property
    def largest_step(self) -> Step:
        """The step that needs the most memory, with everything that rows may ask for."""
        everything = StepNeeds(is_plain=False, has_logprobs=True, has_prompt_logprobs=True, has_embeddings=True)
        return self.step_for(self.largest.bucket.num_tokens, everything)

    def order(self, is_tuned: Callable[[Program], bool]) -> list[Phase]:
        """Return what is compiled, for what, in which order; every program is in one phase, and so is the draw that is
        only used until a general one is compiled.

        The first phases are waited for. With lean programs every plan then has a step, possibly a larger one than it
        needs; programs that XLA tunes are among them, because tuning takes time and memory of the device. Otherwise
        most requests then have steps of few tokens, and the urgent phases add larger steps, and what other requests
        need. The others come in the order in which requests are likely to benefit from them.
        """
        largest = self.largest.bucket
        plain: list[Program] = [PlainDecode(bucket) for bucket in self._plain]
        general = [Forward(bucket, is_decode_only=True) for bucket in self._decode]
        mixed = self._programs_of_prompts(self._mixed)
        verifying = self._programs_that_verify
        tuned = [*filter(is_tuned, plain), *self._with_draws(filter(is_tuned, [*general, *mixed]))]
        tuned += [program for program in verifying if isinstance(program, PlainDecode | Forward) and is_tuned(program)]
        largest_masks = {masks.num_columns: masks for masks in self._masks}.values()
        any_step = Phase("any step", self._with_draws(self._programs_of_prompts([largest])))
        hidden = Phase("hidden states", [PromptLogprobs(largest), Embed(largest)])
        slots = Phase("slots", [Admit(), AdmitExtras(), *self._admits_tokens, *self._copies, *largest_masks])
        if self._has_lean_programs:
            decode = Phase("decode", plain[-1:])
            phases = [each._replace(is_first=True) for each in (any_step, hidden, slots, decode)]
            phases.append(Phase("what XLA tunes on the device", tuned, is_first=True))
        else:
            small = self._programs_of_prompts([self._small])
            lean = Phase(
                "plain requests", [*small, self._lean_draw, Admit(), *self._admits_tokens, *self._copies], is_first=True
            )
            more = Phase("decode", self._with_draws(small))
            # The largest step would take several times as long for the last tokens of all rows.
            all_rows = next(bucket for bucket in self._mixed if bucket.num_rows == largest.num_rows)
            decode = Phase("decode of all rows", self._with_draws(self._programs_of_prompts([all_rows])))
            phases = [lean, *(each._replace(is_urgent=True) for each in (decode, any_step, slots, more, hidden))]
        phases += [
            Phase("verification of drafts", verifying),
            Phase("decode of fewer rows", plain),
            Phase("steps of fewer tokens", self._with_draws(mixed)),
            Phase("decode with penalties, masks or log probabilities", self._with_draws(general)),
            Phase("masks of fewer rows", list(self._masks)),
            Phase("log probabilities of prompts", list(map(PromptLogprobs, self._with_hidden))),
            Phase("embeddings", list(map(Embed, self._with_hidden))),
        ]
        seen: set[Program] = set()
        for index, phase in enumerate(phases):
            new = [program for program in self._with_stages(phase.programs) if program not in seen]
            seen.update(new)
            phases[index] = phase._replace(programs=new)
        return [phase for phase in phases if phase.programs]

    def step_for(
        self,
        num_tokens: int,
        needs: StepNeeds,
        *,
        num_columns: int = 0,
        is_ready: Callable[[Program], bool] = lambda _: True,
    ) -> Step:
        """Return the smallest step for `num_tokens` tokens, at most those of the largest bucket, that supports what
        rows need and whose programs are ready.

        `num_columns`: some rows have that many tokens with their drafts, which are left out if no program for them, or
        for masks of so many columns, is ready.
        """

        def steps() -> Iterator[Step]:
            if needs.is_decode_only and not needs.has_hidden:
                if num_columns > 1:
                    for step in self._steps_that_verify(num_tokens, num_columns, is_plain=needs.is_plain):
                        masks = self._masks_from(num_tokens, step.forward.bucket.num_columns)
                        if not needs.has_masks or any(map(is_ready, masks)):
                            yield step
                if needs.is_plain:
                    for bucket in _from(self._plain, num_tokens):
                        yield Step(plain := PlainDecode(bucket), stages=self._stages(plain))
                for bucket in _from(self._decode, num_tokens):
                    for draw in self._draws(bucket.num_rows, needs.has_logprobs):
                        forward = Forward(bucket, is_decode_only=True)
                        yield Step(forward, draw=draw, stages=self._stages(forward))
            yield from self.steps_of_any(needs, num_tokens)

        return next(step for step in steps() if all(map(is_ready, step.programs)))

    def steps_of_any(self, needs: StepNeeds, num_tokens: int = 0) -> Iterator[Step]:
        """Yield the steps for at least `num_tokens` tokens of rows that may have one or several, the smallest first."""
        for bucket in _from(self._with_hidden if needs.has_hidden else self._mixed, num_tokens):
            draws = self._draws(bucket.num_rows, needs.has_logprobs)
            if needs.is_plain and bucket is self._small and not self._has_lean_programs:
                draws = [*draws, self._lean_draw]
            forward, finish = self._of_prompts(bucket)
            for draw in draws:
                yield Step(
                    forward,
                    finish,
                    draw,
                    prompt_logprobs=PromptLogprobs(bucket) if needs.has_prompt_logprobs else None,
                    embed=Embed(bucket) if needs.has_embeddings else None,
                    stages=self._stages(forward),
                )

    def _steps_that_verify(self, num_rows: int = 0, num_columns: int = 0, *, is_plain: bool = True) -> Iterator[Step]:
        """Yield steps that verify drafts, for at least so many rows and columns, the smallest first."""

        def holding(buckets: list[Bucket]) -> Iterator[Bucket]:
            return (bucket for bucket in buckets if bucket.num_rows >= num_rows and bucket.num_columns >= num_columns)

        if is_plain and self._has_lean_programs:
            yield from (Step(PlainDecode(bucket)) for bucket in holding(self._verifying))
        for bucket in holding(self._verifying_general):
            draw = Draw(bucket.num_rows, has_logprobs=True, num_columns=bucket.num_columns)
            settle = Settle(bucket) if self._has_states else None
            yield Step(Forward(bucket, is_decode_only=False), draw=draw, settle=settle)

    def _stages(self, forward: Program) -> tuple[RunStage, ...]:
        """Return what earlier stages run before this forward pass of the last one."""
        if self._num_stages == 1 or not isinstance(forward, PlainDecode | Forward):
            return ()
        indices = range(self._num_stages - 1)
        return tuple(RunStage(forward.bucket, index, forward.is_decode_only) for index in indices)

    def _with_stages(self, programs: Iterable[Program]) -> list[Program]:
        """Return programs of the last stage, each after those of earlier stages that belong to it."""
        found: dict[Program, None] = {}
        for program in programs:
            found |= dict.fromkeys(self._stages(program))
            if isinstance(program, Admit | KeepState | ResumeState):
                found |= dict.fromkeys(map(type(program), range(self._num_stages - 1)))
            found[program] = None
        return list(found)

    @property
    def _programs_that_verify(self) -> list[Program]:
        return [program for step in self._steps_that_verify() for program in step.programs]

    @property
    def _lean_draw(self) -> Draw:
        """A draw that is compiled in two thirds of a general one's time, with which the first requests are served."""
        return Draw(self._small.num_rows, has_logprobs=False, is_plain=True)

    @property
    def _admits_tokens(self) -> list[AdmitTokens]:
        return [AdmitTokens()] if self._keeps_tokens else []

    def masks_for(
        self, num_rows: int, *, num_columns: int = 1, is_ready: Callable[[Program], bool] = lambda _: True
    ) -> Allow:
        """Return the program that writes the masks of `num_rows` rows in so many columns, of which one is ready."""
        return next(filter(is_ready, self._masks_from(num_rows, num_columns)))

    def _masks_from(self, num_rows: int, num_columns: int) -> Iterator[Allow]:
        of_width = (masks for masks in self._masks if masks.num_columns == num_columns)
        return (masks for masks in of_width if masks.num_rows >= num_rows)

    def _with_draws(self, forwards: Iterable[Forward | Begin | Finish]) -> list[Program]:
        """Return forward passes, each with the draws of its rows."""
        return [
            program
            for forward in forwards
            for program in (forward, *reversed(self._draws(forward.bucket.num_rows, has_logprobs=False)))
        ]

    def _draws(self, num_rows: int, has_logprobs: bool) -> list[Draw]:
        """Return the draws that may follow a forward pass of `num_rows` rows, the one that does least first."""
        general = Draw(num_rows, has_logprobs=True)
        return [general] if has_logprobs or not self._has_lean_programs else [Draw(num_rows, False), general]

    def _of_prompts(self, bucket: Bucket) -> tuple[Forward | Begin, Finish | None]:
        """Return the forward pass in which rows may have several tokens: one program, or two."""
        if bucket.num_tokens <= self._max_tokens_of_two:
            return Begin(bucket), Finish(bucket)
        return Forward(bucket, is_decode_only=False), None

    def _programs_of_prompts(self, buckets: Iterable[Bucket]) -> list[Forward | Begin | Finish]:
        return [program for bucket in buckets for program in self._of_prompts(bucket) if program is not None]


def _from(buckets: list[Bucket], num_tokens: int) -> Iterator[Bucket]:
    """Return the buckets that hold `num_tokens` tokens, the smallest first."""
    return (bucket for bucket in buckets if bucket.num_tokens >= num_tokens)


def _sparse(buckets: list[Bucket]) -> Iterator[Bucket]:
    """Buckets in steps of four, the smallest and the largest among them."""
    size = 0
    for bucket in buckets:
        if bucket.num_tokens >= 4 * size or bucket is buckets[-1]:
            size = bucket.num_tokens
            yield bucket
