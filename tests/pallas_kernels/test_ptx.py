"""Reading PTX for registers that are used while a wgmma still writes or reads them."""

import functools
import textwrap

import jax
import jax.numpy as jnp
import pytest
from depths import quick_first

from pallas_kernels import deviceless, ptx
from pallas_kernels.small_matmul import matmul, sm90

WGMMA = "{ .reg .pred p; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2}, %rd1, %rd2, p, 1, 1, 0, 0; }"
COMMIT = "wgmma.commit_group.sync.aligned;"
READ = "add.f32 %r9, %r2, %r8;"
COPY = "mov.b32 %r5, %r1;"
OF_SUMS = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r21,%r22}, {%r1,%r2,%r3,%r4}, %rd2, p, 1, 1, 1;"
CHANGE = "@%p1 mov.b32 %r3, %r8;"
LOAD = "ld.shared.v2.b32 {%r4, %r6}, [%r9];"
ASSEMBLY = "{ .reg .b32 a; mov.b32 a, %r9; lop3.b32 a, a, 1, 2, 0xea; sub.bf16x2 %r2, a, %r8; }"
TARGETS = ["JTI0_0:", "\t.branchtargets", "\t\t$L1,", "\t\t$L2;"]  # as LLVM writes them


def wait(count):
    return f"wgmma.wait_group.sync.aligned {count};"


def uses_of(*lines):
    return ptx.used_in_flight("\n".join([*lines, "ret;"]))


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
        ([WGMMA, COMMIT, COPY, wait(0), "add.f32 %r9, %r5, %r8;"], [COPY]),
        ([WGMMA, COMMIT, "mov.b32 %r2, %r4;", wait(0)], ["mov.b32 %r2, %r4;"]),
        ([WGMMA, COMMIT, "@%p1 add.f32 %r1, %r5, %r6;", wait(0)], ["@%p1 add.f32 %r1, %r5, %r6;"]),
        ([WGMMA, COMMIT, "{ cvt.rn.bf16x2.f32 %r5, %r1, %r2; }"], ["{ cvt.rn.bf16x2.f32 %r5, %r1, %r2; }"]),
        ([WGMMA, COMMIT, OF_SUMS, wait(0)], [OF_SUMS]),
        ([OF_SUMS, COMMIT, READ, "st.shared.v2.b32 [%r1], {%r2, %r3};", wait(0), COPY, CHANGE], []),
        ([OF_SUMS, COMMIT, CHANGE, wait(0)], [CHANGE]),
        ([OF_SUMS, COMMIT, LOAD, wait(0)], [LOAD]),
        ([OF_SUMS, COMMIT, ASSEMBLY, wait(0)], [ASSEMBLY]),
    ],
    ids=str,
)
def test_a_read_before_the_wait_is_found(lines, found):
    assert uses_of(*lines) == found


@pytest.mark.parametrize(("count", "found"), [(0, []), (1, [READ])])
def test_a_read_in_the_next_turn_of_a_loop_is_found(count, found):
    assert uses_of("$L1:", READ, WGMMA, COMMIT, wait(count), "@%p1 bra $L1;") == found


@pytest.mark.parametrize(("count", "found"), [(0, []), (1, [CHANGE])])
def test_a_change_of_an_operand_in_the_next_turn_of_a_loop_is_found(count, found):
    assert uses_of("$L1:", CHANGE, OF_SUMS, COMMIT, wait(count), "@%p1 bra $L1;") == found


@pytest.mark.parametrize("branch", ["@%p1 bra $L1;", "@!%p1 bra.uni $L1;", "brx.idx %r7, JTI0_0;"])
def test_a_read_on_one_of_two_paths_is_found(branch):
    lines = [WGMMA, COMMIT, *TARGETS, branch, wait(0), READ, "$L2:", "ret;", "$L1:"]
    assert uses_of(*lines) == []
    assert uses_of(*lines, READ) == [READ]


def test_a_read_behind_an_unconditional_branch_is_on_no_path():
    assert uses_of(WGMMA, COMMIT, "bra.uni $L1;", READ, "$L1:", wait(0), READ) == []


def test_a_wgmma_that_no_path_leads_to_is_not_passed_over():
    with pytest.raises(ValueError, match=r"no path leads to .*wgmma"):
        uses_of("brx.idx %r7, JTI0_0;", "$L1:", WGMMA)


def test_entries_are_distinguished():
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "output_dtype", "too_early"),
    quick_first([(1, jnp.bfloat16, "cvt.rn.bf16x2"), (64, jnp.bfloat16, "cvt.u64"), (64, jnp.float32, "cvt.u64")]),
    ids=str,
)
def test_sums_of_an_unrolled_loop_are_read_behind_the_wait(monkeypatch, num_rows, output_dtype, too_early):
    """Without `written` LLVM rounds or sends the sums of two unrolled steps before the wait; a GPU got them wrong."""

    def compile_kernel():
        jax.clear_caches()
        x, weight = (jax.ShapeDtypeStruct((rows, 512), jnp.bfloat16) for rows in (num_rows, 768))
        run = functools.partial(matmul, output_dtype=output_dtype, implementation="sm90")
        return deviceless.compile_for_h200(run, x, weight)

    compile_kernel()
    monkeypatch.setattr(sm90, "written", lambda sums: sums)
    with pytest.raises(RuntimeError, match=f"uses registers that a wgmma still writes or reads: {too_early}"):
        compile_kernel()
    jax.clear_caches()
