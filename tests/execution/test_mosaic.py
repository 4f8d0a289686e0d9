"""Kernels compiled by themselves, for an H200 that is not there, and found by the programs that call them."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.execution.mosaic import compile_kernel, kernels_of, share_kernels
from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.deviceless import compile_lowered, h200_mesh, without_cache


def lower(mesh, *widths):
    """A program with two calls of the same kernel for each width, which no other test has."""

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


def test_programs_share_kernels_whenever_they_are_lowered():
    mesh = h200_mesh()
    one, two = (share_kernels(lower(mesh, *widths)) for widths in [(2944,), (2944, 3328)])
    assert kernels_of(one) < kernels_of(two)
    assert kernels_of(share_kernels(one)) == kernels_of(one)
    assert one.as_text() == share_kernels(lower(mesh, 2944)).as_text()
    assert one.as_text() != lower(mesh, 2944).as_text()  # nothing to do, unless jax numbers kernels


def test_a_kernel_that_is_compiled_is_found_by_the_programs_that_call_it():
    mesh = h200_mesh()

    def num_built(*widths):
        return len(compile_lowered(lambda: share_kernels(lower(mesh, *widths))).kernels)

    assert num_built(3584) == 1
    with without_cache():
        for kernel in kernels_of(share_kernels(lower(mesh, 3712))):
            compile_kernel(kernel, mesh)
    assert num_built(3712) == 0
    assert num_built(3712, 3840) == 1
