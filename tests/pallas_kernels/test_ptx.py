"""Reading PTX for accumulators that are read while a wgmma still writes them."""

import textwrap

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import deviceless, ptx
from pallas_kernels.small_matmul import matmul, sm90

WGMMA = "{ .reg .pred p; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2}, %rd1, %rd2, p, 1, 1, 0, 0; }"
COMMIT = "wgmma.commit_group.sync.aligned;"
READ = "add.f32 %r9, %r2, %r8;"


def wait(count):
    return f"wgmma.wait_group.sync.aligned {count};"


def reads_of(*lines):
    return ptx.read_in_flight("\n".join([*lines, "ret;"]))


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([WGMMA, COMMIT, wait(0), READ], []),
        ([WGMMA, COMMIT, READ, wait(0)], [READ]),
        ([WGMMA, READ], [READ]),
        ([WGMMA, COMMIT, wait(1), READ], [READ]),
        ([WGMMA, COMMIT, COMMIT, wait(1), READ], []),  # of the group before the newest
        ([WGMMA, COMMIT, "add.f32 %r9, %r12, %r8;"], []),
        ([WGMMA, COMMIT, WGMMA, COMMIT, wait(0), READ], []),  # wgmmas may add to what another still writes
        ([WGMMA, COMMIT, "mov.b32 %r5, %r1;", "add.f32 %r9, %r5, %r8;"], ["add.f32 %r9, %r5, %r8;"]),
        ([WGMMA, COMMIT, "mov.b32 %r2, %r4;", READ], []),
    ],
    ids=str,
)
def test_a_read_before_the_wait_is_found(lines, found):
    assert reads_of(*lines) == found


@pytest.mark.parametrize(("count", "found"), [(0, []), (1, [READ])])
def test_a_read_in_the_next_turn_of_a_loop_is_found(count, found):
    assert reads_of("$L1:", READ, WGMMA, COMMIT, wait(count), "@%p1 bra $L1;") == found


@pytest.mark.parametrize("branch", ["@%p1 bra $L1;", "@!%p1 bra.uni $L1;", "brx.idx %r7, $T;"])
def test_a_read_on_one_of_two_paths_is_found(branch):
    lines = [WGMMA, COMMIT, "$T: .branchtargets $L1, $L2;", branch, wait(0), READ, "$L2:", "ret;", "$L1:"]
    assert reads_of(*lines) == []
    assert reads_of(*lines, READ) == [READ]


def test_a_read_behind_an_unconditional_branch_is_on_no_path():
    assert reads_of(WGMMA, COMMIT, "bra.uni $L1;", READ, "$L1:", wait(0), READ) == []


def test_entries_are_told_apart():
    text = textwrap.dedent("""
        .visible .entry first_mosaic_gpu_kernel(
        ) { one }
        .visible .entry second(
        ) { two }
    """)
    assert [(name, body.split("{ ")[1].split(" }")[0]) for name, body in ptx.entries(text)] == [
        ("first", "one"),
        ("second", "two"),
    ]


def test_sums_of_an_unrolled_loop_are_read_behind_the_wait(monkeypatch):
    """Of an unrolled loop of two, without `written`, LLVM rounds the sums before the wait; a GPU got them wrong."""

    def compiled(depth):
        x, weight = (jax.ShapeDtypeStruct((rows, depth), jnp.bfloat16) for rows in (1, 768))
        return deviceless.compile_for_h200(lambda x, weight: matmul(x, weight, implementation="sm90"), x, weight)

    assert len(compiled(512).kernels) == 1
    jax.clear_caches()
    monkeypatch.setattr(sm90, "written", lambda sums: sums)
    with pytest.raises(RuntimeError, match=r"reads accumulators that a wgmma still writes: cvt"):
        compiled(512)
    jax.clear_caches()
