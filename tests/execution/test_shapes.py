"""Every plan has a step, which can do what the plan needs, and there are few of them."""

import itertools

import pytest

from jaxserve.execution.batch import make_buckets
from jaxserve.execution.shapes import ANYTHING, PLAIN_DECODE, PREFILL, StepShapes


def make_shapes(budget, max_num_seqs, *, has_special_steps=True):
    buckets = make_buckets(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, block_size=16)
    return StepShapes(buckets, has_special_steps=has_special_steps)


def test_few_steps_on_a_gpu():
    sizes = {}
    for bucket, *kind in make_shapes(8192, 256).keys:
        sizes.setdefault(tuple(kind), []).append(bucket.num_tokens)
    assert sizes[PLAIN_DECODE] == [256, 128, 64, 32, 16, 4, 1]
    assert sizes[PREFILL] == [8192, 4096, 2048, 1024, 512, 256, 64]
    assert sum(map(len, sizes.values())) == 22


def test_one_step_a_bucket_on_a_cpu():
    shapes = make_shapes(512, 64, has_special_steps=False)
    assert [key[1:] for key in shapes.keys] == [ANYTHING] * 8
    for is_plain, is_decode_only in itertools.product((False, True), repeat=2):
        key = shapes.key_for(3, is_plain=is_plain, is_decode_only=is_decode_only, has_logprobs=False)
        assert key == (shapes.keys[-2].bucket, *ANYTHING)


@pytest.mark.parametrize("has_special_steps", [True, False])
@pytest.mark.parametrize(
    ("budget", "max_num_seqs"), [(1, 1), (2, 1), (5, 4), (32, 8), (64, 100), (100, 100), (300, 100), (1000, 300)]
)
def test_every_plan_has_a_step(budget, max_num_seqs, has_special_steps):
    shapes = make_shapes(budget, max_num_seqs, has_special_steps=has_special_steps)
    keys = set(shapes.keys)
    assert len(keys) == len(shapes.keys)
    assert shapes.largest in keys
    assert shapes.largest.bucket.num_tokens == budget
    flags = ("is_plain", "is_decode_only", "has_logprobs")
    for num_tokens, *values in itertools.product(range(1, budget + 1), *[(False, True)] * 3):
        needs = dict(zip(flags, values, strict=True))
        key = shapes.key_for(num_tokens, **needs)
        assert key in keys
        assert key.bucket.num_tokens >= num_tokens
        # As many rows as such a plan can have; one that is padded has fewer.
        assert key.bucket.num_rows >= min(num_tokens, max_num_seqs)
        assert key.has_logprobs >= needs["has_logprobs"]
        assert key.is_plain <= needs["is_plain"]
        assert key.is_decode_only <= needs["is_decode_only"]
        if key.is_decode_only:
            assert key.bucket.num_rows == key.bucket.num_tokens
