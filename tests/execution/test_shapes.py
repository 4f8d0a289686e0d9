"""Every plan has programs that support what the plan needs, and there are few programs."""

import itertools

import pytest

from jaxserve.execution.batch import make_buckets, make_verifying_buckets
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
    PlainDecode,
    PromptLogprobs,
)
from jaxserve.execution.programs.lowering import MAX_WORKERS
from jaxserve.execution.programs.shapes import MAX_TOKENS_IN_PROGRAMS, Step, StepNeeds, StepShapes


def make_shapes(budget, max_num_seqs, *, has_lean_programs=True):
    buckets = make_buckets(
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        block_size=16,
        has_finer_sizes=has_lean_programs,
    )
    return StepShapes(buckets, has_lean_programs=has_lean_programs, may_be_two_programs=False)


def plans(shapes, budget):
    """Return numbers of tokens, each with what its rows may need: all that differ in which sizes hold them."""
    sizes = {program.size for program in shapes.programs}
    numbers = {1, budget} | {size + more for size in sizes for more in (0, 1) if 0 < size + more <= budget}
    needs = itertools.starmap(StepNeeds, itertools.product((False, True), repeat=len(StepNeeds._fields)))
    return itertools.product(sorted(numbers), needs)


@pytest.mark.parametrize("budget", [64, 8192])
def test_both_programs_of_a_prompt_are_compiled_and_used_together(budget):
    buckets = make_buckets(max_num_batched_tokens=budget, max_num_seqs=64, block_size=16, has_finer_sizes=True)
    shapes = StepShapes(buckets, has_lean_programs=True, may_be_two_programs=True)
    phases = shapes.order(lambda _: False)
    in_order = [program for phase in phases for program in phase.programs]
    assert sorted(map(str, in_order)) == sorted(map(str, shapes.programs))
    first = {program for phase in phases if phase.is_first for program in phase.programs}
    for num_tokens in (1, 17, budget):
        needs = StepNeeds(is_plain=False)
        small, ready = (
            shapes.step_for(num_tokens, needs),
            shapes.step_for(num_tokens, needs, is_ready=first.__contains__),
        )
        for step in (small, ready):
            is_short = step.forward.bucket.num_tokens <= MAX_TOKENS_IN_PROGRAMS
            expected = (Begin, Finish) if is_short else (Forward, type(None))
            assert (type(step.forward), type(step.finish)) == expected
        assert first.issuperset(ready.programs)


def sizes(shapes, kind, **fields):
    """Tokens of the programs of a kind, in the order in which they are compiled."""
    return [
        program.bucket.num_tokens
        for program in shapes.programs
        if isinstance(program, kind) and all(getattr(program, name) == value for name, value in fields.items())
    ]


def test_few_programs_on_a_gpu():
    shapes = make_shapes(8192, 256)
    plain, decode = sizes(shapes, PlainDecode), sizes(shapes, Forward, is_decode_only=True)
    mixed = sizes(shapes, Forward, is_decode_only=False)
    assert plain == [256, 192, 128, 64, 32, 16, 4, 1]
    assert decode == [256, 64, 16]
    assert mixed == [8192, 7168, 6144, 5120, 4096, 3072, 2048, 1536, 1024, 768, 512, 256, 128, 64]
    assert sizes(shapes, PromptLogprobs) == sizes(shapes, Embed) == [8192, 4096, 1024, 256, 64]
    draws = [program for program in shapes.programs if isinstance(program, Draw)]
    assert draws == [Draw(num_rows, has_logprobs) for num_rows in (256, 128, 64, 16) for has_logprobs in (True, False)]
    with_layers = shapes.programs[: len(plain + decode + mixed)]
    assert all(isinstance(program, PlainDecode | Forward) for program in with_layers)
    assert len(with_layers) == MAX_WORKERS
    on_slots = [Admit(), AdmitExtras(), *map(Allow, (1, 8, 64, 256))]
    assert shapes.programs[-len(on_slots) :] == on_slots
    assert len(shapes.programs) == 43 + len(on_slots)


@pytest.mark.parametrize(
    ("max_num_seqs", "decode", "hidden", "draws"),
    [
        (512, [16, 64, 256, 512], [64, 256, 1024, 4096, 8192], [16, 64, 128, 256, 512]),
        (1024, [16, 64, 256, 1024], [64, 256, 1024, 4096, 8192], [16, 64, 128, 256, 512, 1024]),
        (300, [16, 64, 256, 304], [64, 256, 1024, 4096, 8192], [16, 64, 128, 256, 304]),
    ],
)
def test_finer_sizes_add_no_program_for_what_few_rows_need(max_num_seqs, decode, hidden, draws):
    shapes = make_shapes(8192, max_num_seqs)
    assert sizes(shapes, Forward, is_decode_only=True) == decode[::-1]
    assert sizes(shapes, PromptLogprobs) == sizes(shapes, Embed) == hidden[::-1]
    num_rows = [program.num_rows for program in shapes.programs if isinstance(program, Draw)]
    assert num_rows[::2] == num_rows[1::2] == draws[::-1]


@pytest.mark.parametrize(
    ("num_tokens", "is_decode_only", "expected"),
    [(137, True, 192), (137, False, 256), (600, False, 768), (4164, False, 5120), (7200, False, 8192)],
)
def test_a_step_has_little_padding(num_tokens, is_decode_only, expected):
    step = make_shapes(8192, 256).step_for(num_tokens, StepNeeds(is_decode_only=is_decode_only))
    assert step.forward.bucket.num_tokens == expected


@pytest.mark.parametrize("has_lean_programs", [True, False])
@pytest.mark.parametrize(("budget", "max_num_seqs"), [(8, 4), (32, 8), (300, 100), (8192, 256)])
def test_steps_that_verify_drafts(budget, max_num_seqs, has_lean_programs):
    """Every number of rows that has drafts has a program, which is compiled before it is needed; if it is not yet, a
    step without drafts takes its place.
    """
    buckets = make_buckets(
        max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, block_size=16, has_finer_sizes=has_lean_programs
    )
    sizes = {"block_size": 16, "num_groups": 2}
    verifying = [
        bucket
        for num_columns, most in ((3, 64), (5, 4))
        for bucket in make_verifying_buckets(buckets, num_columns=num_columns, max_num_rows=most, **sizes)
    ]
    kind = {"has_lean_programs": has_lean_programs, "may_be_two_programs": False}
    plain, shapes = StepShapes(buckets, **kind), StepShapes(buckets, **kind, keeps_tokens=True, verifying=verifying)
    programs = set(shapes.programs)
    assert len(programs) == len(shapes.programs)
    in_order = {program for phase in shapes.order(lambda _: False) for program in phase.programs}
    assert programs == {program for program in in_order if not (isinstance(program, Draw) and program.is_plain)}
    assert programs > set(plain.programs) | {AdmitTokens()}
    used = set()
    for num_columns, most in ((2, 64), (3, 64), (4, 4), (5, 4)):
        for num_rows in range(1, min(most, max_num_seqs, budget // num_columns) + 1):
            for is_plain, has_logprobs in ((True, False), (False, False), (False, True)):
                needs = StepNeeds(is_plain=is_plain, is_decode_only=True, has_logprobs=has_logprobs)
                step = shapes.step_for(num_rows, needs, num_columns=num_columns)
                bucket = step.forward.bucket
                if bucket.num_columns:
                    assert bucket.num_columns >= num_columns
                    assert bucket.num_rows >= num_rows
                    assert bucket.num_tokens == bucket.num_rows * bucket.num_columns <= budget
                    assert bucket.num_new_blocks >= 2 * num_rows
                    used |= set(step.programs)
                    used.add(masks := shapes.masks_for(num_rows, num_columns=bucket.num_columns))
                    ready = programs - {each for each in programs if isinstance(each, Allow)}
                    given = {"num_columns": num_columns, "is_ready": ready.__contains__}
                    masked = needs._replace(has_masks=True)
                    assert not shapes.step_for(num_rows, masked, **given).forward.bucket.num_columns
                    given["is_ready"] = (ready | {masks}).__contains__
                    assert shapes.step_for(num_rows, masked, **given) == step
                else:  # no power of two, and too many columns for one more row
                    assert num_rows * num_columns > budget // 2
                assert step.draw is None or step.draw.num_columns == bucket.num_columns
                before = shapes.step_for(
                    num_rows, needs, num_columns=num_columns, is_ready=set(plain.programs).__contains__
                )
                assert before == plain.step_for(num_rows, needs)
    assert used == programs - set(plain.programs) - {AdmitTokens()}


def test_one_forward_a_bucket_and_one_draw_a_number_of_rows_on_a_cpu():
    shapes = make_shapes(512, 64, has_lean_programs=False)
    assert sizes(shapes, Forward) == [512, 256, 128, 64, 32, 16, 4, 1]
    assert [program for program in shapes.programs if isinstance(program, Draw)] == [
        Draw(num_rows, has_logprobs=True) for num_rows in (64, 32, 16, 4, 1)
    ]
    for values in itertools.product((False, True), repeat=3):
        step = shapes.step_for(3, StepNeeds(*values))
        bucket = shapes.programs[6].bucket
        assert bucket.num_tokens == 4
        assert step == Step(Forward(bucket, is_decode_only=False), draw=Draw(4, has_logprobs=True))


@pytest.mark.parametrize("has_lean_programs", [True, False])
@pytest.mark.parametrize(
    ("budget", "max_num_seqs"),
    [(1, 1), (2, 1), (5, 4), (32, 8), (64, 100), (100, 100), (300, 100), (1000, 300), (1000, 1000)],
)
def test_every_plan_has_a_step(budget, max_num_seqs, has_lean_programs):
    shapes = make_shapes(budget, max_num_seqs, has_lean_programs=has_lean_programs)
    of_steps = [program for program in shapes.programs if not isinstance(program, Admit | AdmitExtras | Allow)]
    masks = {shapes.masks_for(size) for size in range(1, min(budget, max_num_seqs) + 1)}
    assert masks | {Admit(), AdmitExtras()} == set(shapes.programs) - set(of_steps)
    unused = set(of_steps)
    assert len(unused) == len(of_steps)
    assert shapes.largest in unused
    assert shapes.largest.bucket.num_tokens == budget
    programs = frozenset(unused)
    for num_tokens, needs in plans(shapes, budget):
        if needs.is_plain and (needs.has_logprobs or needs.has_embeddings):
            continue  # rows that need more are not plain
        step = shapes.step_for(num_tokens, needs)
        used = set(step.programs)
        assert used <= programs
        unused -= used
        bucket = step.forward.bucket
        assert bucket.num_tokens >= num_tokens
        # As many rows as such a plan can have; a padded one has fewer.
        assert bucket.num_rows >= min(num_tokens, max_num_seqs)
        if step.draw is None:
            assert isinstance(step.forward, PlainDecode)
            assert needs.is_plain
        else:
            assert step.draw.num_rows == bucket.num_rows
            assert step.draw.has_logprobs >= needs.has_logprobs
        if isinstance(step.forward, PlainDecode) or step.forward.is_decode_only:
            assert needs.is_decode_only
            assert bucket.num_rows == bucket.num_tokens
        if needs.has_prompt_logprobs:
            assert step.prompt_logprobs == PromptLogprobs(bucket)
            assert not step.forward.is_decode_only
        else:
            assert step.prompt_logprobs is None
        if needs.has_embeddings:
            assert step.embed == Embed(bucket)
            assert not step.forward.is_decode_only
        else:
            assert step.embed is None
    assert not unused


@pytest.mark.parametrize("has_lean_programs", [True, False])
@pytest.mark.parametrize(("budget", "max_num_seqs"), [(1, 1), (5, 4), (64, 100), (300, 100), (1000, 1000)])
def test_every_plan_has_a_step_among_the_first_programs(budget, max_num_seqs, has_lean_programs):
    """And the urgent ones, where plans are small before these are there; later it has one with less padding."""
    shapes = make_shapes(budget, max_num_seqs, has_lean_programs=has_lean_programs)
    order = shapes.order(lambda _: False)
    programs = [program for phase in order for program in phase.programs]
    lean = (
        [] if has_lean_programs else [program for program in programs if isinstance(program, Draw) and program.is_plain]
    )
    assert len(lean) == (not has_lean_programs)
    assert sorted(map(repr, programs)) == sorted(map(repr, [*shapes.programs, *lean]))
    first = {program for phase in order if phase.is_first or phase.is_urgent for program in phase.programs}
    assert [phase.is_first for phase in order] == sorted((phase.is_first for phase in order), reverse=True)
    assert shapes.largest in first
    for num_tokens, needs in plans(shapes, budget):
        step = shapes.step_for(num_tokens, needs, is_ready=first.__contains__)
        assert set(step.programs) <= first
        exact = shapes.step_for(num_tokens, needs)
        assert num_tokens <= exact.forward.size <= step.forward.size
        assert step.draw is None or step.draw.has_logprobs >= needs.has_logprobs
        assert (step.prompt_logprobs is not None, step.embed is not None) == (
            needs.has_prompt_logprobs,
            needs.has_embeddings,
        )
    for num_rows in range(1, min(budget, max_num_seqs) + 1):
        assert shapes.masks_for(num_rows, is_ready=first.__contains__) in first


def test_the_order_of_programs_on_a_gpu():
    """What XLA tries out on the device comes before the cache takes its memory, then what most requests gain from."""
    shapes = make_shapes(8192, 256)
    order = shapes.order(lambda program: isinstance(program, Forward | PlainDecode) and program.size < 128)
    assert [str(phase) for phase in order][:5] == [
        "first, for any step: forward 8192; draw with log probabilities 256; draw 256",
        "first, for hidden states: prompt logprobs 8192; embed 8192",
        "first, for slots: admit; admit extras; allow 256",
        "first, for decode: plain decode 256",
        "first, for what XLA tunes on the device: plain decode 1, 4, 16, 32, 64; forward of decode rows 16, 64; "
        "draw with log probabilities 16, 64; draw 16, 64; forward 64",
    ]
    assert [phase.purpose for phase in order][5:] == [
        "decode of fewer rows",
        "steps of fewer tokens",
        "decode with penalties, masks or log probabilities",
        "masks of fewer rows",
        "log probabilities of prompts",
        "embeddings",
    ]


def test_the_order_of_programs_on_a_cpu():
    """What serves a chat, then what serves anything, then what serves it faster."""
    order = make_shapes(512, 64, has_lean_programs=False).order(lambda _: False)
    assert [str(phase) for phase in order if phase.is_first or phase.is_urgent] == [
        "first, for plain requests: forward 16; draw 16; admit",
        "then, for decode of all rows: forward 64; draw with log probabilities 64",
        "then, for any step: forward 512",
        "then, for slots: admit extras; allow 64",
        "then, for decode: draw with log probabilities 16",
        "then, for hidden states: prompt logprobs 512; embed 512",
    ]
    assert [phase.is_urgent for phase in order] == [False] + [True] * 5 + [False] * (len(order) - 6)
