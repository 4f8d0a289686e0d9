"""Kernels compiled by themselves, for an H200 that is not there, and found by the programs that call them."""

import jax
import jax.numpy as jnp
import pytest
from depths import quick_first
from jax.sharding import NamedSharding, PartitionSpec
from step_specs import make_spec

from jaxserve.bench.shapes import LLAMA_3_8B
from jaxserve.execution.programs.builder import StepBuilder
from jaxserve.execution.programs.lowering import Lowering
from jaxserve.execution.programs.mosaic import compile_kernel, kernels_of
from jaxserve.layers.sharding import with_explicit_axes
from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.deviceless import compile_lowered, h200_mesh, without_cache


def lower(mesh, *widths):
    """Lower a program with two calls of the same kernel for each width; no other test uses these widths."""

    def program(*xs):
        for _ in range(2):
            xs = [sum(add_rms_norm(x, x, x[0], eps=1e-5, implementation="sm90")) for x in xs]
        return xs

    replicated = NamedSharding(mesh, PartitionSpec())
    xs = (jax.ShapeDtypeStruct((3, width), jnp.bfloat16, sharding=replicated) for width in widths)
    with jax.set_mesh(mesh):
        return jax.jit(program).lower(*xs)


def test_kernels_of_a_program():
    mesh = h200_mesh()
    assert [len(kernels_of(lower(mesh, *widths))) for widths in [(), (2944,), (2944, 3328)]] == [0, 1, 2]
    assert all(isinstance(value, bytes | bool) for kernel in kernels_of(lower(mesh, 2944)) for value in kernel)


def test_a_program_without_any():
    assert kernels_of(jax.jit(jnp.sin).lower(1.0)) == set()


@pytest.mark.parametrize(("num_devices", "width"), quick_first([(1, 3712), (2, 4480)]))
def test_a_kernel_that_is_compiled_is_found_by_the_program_that_calls_it(num_devices, width):
    mesh = h200_mesh((num_devices,))
    program = lower(mesh, width)
    with without_cache():
        for kernel in kernels_of(program):
            compile_kernel(kernel, mesh)
    assert compile_lowered(lambda: program).kernels == ()
    assert len(compile_lowered(lambda: lower(mesh, width + 128, width + 256)).kernels) == 2


@pytest.mark.slow
def test_kernels_that_another_process_has_lowered():
    """An exported program is passed on in a format that this process need not understand."""
    sizes = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    spec = make_spec(LLAMA_3_8B | {"num_hidden_layers": 1}, **sizes)
    mesh = with_explicit_axes(h200_mesh((1,), ("tensor",)))
    builder = StepBuilder(spec, mesh)
    lowering = Lowering(builder, folder=None, num_workers=1)
    try:
        programs = [lowering.lower(program, 1000) for program in builder.shapes.programs[:2]]
    finally:
        lowering.close()
    assert lowering.num_made == 2
    assert kernels_of(programs[0]) & kernels_of(programs[1])
    with without_cache():
        for kernel in set().union(*map(kernels_of, programs)):
            compile_kernel(kernel, mesh)
    for program in programs:
        assert len(kernels_of(program)) > 3
        assert compile_lowered(lambda program=program: program).kernels == ()
