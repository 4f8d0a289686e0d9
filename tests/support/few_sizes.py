"""On a CPU, engines of tests compile steps of two sizes: a token for every row, and all tokens that a step may have."""

import contextlib

import pytest

from jaxserve.execution.batch import make_buckets
from jaxserve.execution.programs import model


def few_buckets(*, has_finer_sizes=False, **limits):
    """Return the two of all sizes; on a GPU, where which programs there are depends on sizes, all."""
    buckets = make_buckets(has_finer_sizes=has_finer_sizes, **limits)
    if has_finer_sizes:
        return buckets
    most = min(limits["max_num_seqs"], limits["max_num_batched_tokens"]), limits["max_num_batched_tokens"]
    return [bucket for bucket in buckets if bucket.num_tokens in most]


@contextlib.contextmanager
def few_sizes():
    """Let models that are built in this process have few sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "make_buckets", few_buckets)
        yield


@contextlib.contextmanager
def every_size():
    """Let models that are built meanwhile have the sizes that a user's have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "make_buckets", make_buckets)
        yield
