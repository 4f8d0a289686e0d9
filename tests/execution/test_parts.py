"""Functions in two parts compute what the whole ones do, and donate their arguments as soon as nothing else needs
them.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.execution.programs.parts import CompiledInTwo, LoweredInTwo, cut_in_two, parts_of
from jaxserve.layers.launch import launch_boundary
from jaxserve.layers.linear import linear
from jaxserve.layers.sharding import with_explicit_axes
from jaxserve.layers.weight import Dense

TABLE = np.arange(4, dtype=np.float32)


def make_mesh(num_devices):
    return with_explicit_axes(jax.make_mesh((num_devices,), ("tensor",), devices=jax.devices()[:num_devices]))


def lower(function, mesh, *arguments, donated=()):
    """Lower a function of arrays as the builder does."""
    with jax.set_mesh(mesh):
        traced = jax.jit(function).trace(*arguments)
        halves = cut_in_two(traced.jaxpr, donated=donated)
        if halves is None:
            return None
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in arguments]
        parts = [
            jax.jit(part, donate_argnums=given_up).lower(*inputs)
            for part, given_up, inputs in zip(
                halves.functions, halves.cut.donated, halves.cut.inputs(shapes, mesh), strict=True
            )
        ]
    return LoweredInTwo(*parts, halves.cut, jax.tree.structure(traced.out_info))


def put(mesh, *arrays):
    return [jax.device_put(x, NamedSharding(mesh, PartitionSpec())) for x in arrays]


def test_everything_goes_where_it_is_needed():
    """Constants of either part, results of the first that the second needs too, and inputs that are returned
    unchanged.
    """

    def function(early, late, both, through, unused):
        x = early * 2 + TABLE + both
        early = early + 1
        y = launch_boundary(x) * late + TABLE + both
        return {"early": early, "x": x}, [y, through], late - 1

    mesh = make_mesh(1)
    arguments = put(mesh, *(np.full(4, value, np.float32) for value in (1, 2, 3, 4, 5)))
    lowered = lower(function, mesh, *arguments, donated=(0, 1, 3))
    assert len(parts_of(lowered)) == 2
    cut = lowered.cut
    assert (cut.first_inputs, cut.second_inputs) == ((0, 2), (1, 2, 3))
    assert (cut.first_donated, cut.second_donated) == ((0,), (0, 2))
    want = jax.tree.map(np.asarray, function(*arguments))
    compiled = lowered.compile()
    assert isinstance(compiled, CompiledInTwo)
    got = compiled(*arguments)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert [x.is_deleted() for x in arguments[:3]] == [True, True, False]
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * 16


def test_what_both_need_is_given_up_by_the_second():
    def function(x):
        return launch_boundary(x * 2) + x

    mesh = make_mesh(1)
    [x] = put(mesh, np.ones(4, np.float32))
    lowered = lower(function, mesh, x, donated=(0,))
    assert (lowered.cut.first_donated, lowered.cut.second_donated) == ((), (0,))
    np.testing.assert_array_equal(lowered.compile()(x), 3)


def test_arrays_are_given_up_to_what_takes_their_place():
    """Keys first, then values, in the order of the inputs, while layers compute them alternately."""

    def function(keys, values):
        keys, values = list(keys), list(values)
        x = jnp.zeros(())
        for index in range(4):
            keys[index] = keys[index].at[0].add(1)
            values[index] = values[index].at[0].add(x + 2)
            x = x + values[index][0]
            if index == 1:
                x = launch_boundary(x)
        return keys, values

    mesh = make_mesh(1)
    arguments = put(mesh, *(np.full(1000, value, np.float32) for value in range(8)))
    lowered = lower(lambda *leaves: function(leaves[:4], leaves[4:]), mesh, *arguments, donated=range(8))
    compiled = lowered.compile()
    for part in (compiled.first, compiled.second):
        pairs = re.findall(r"{(\d+)}: \((\d+)", part.as_text().splitlines()[0])
        assert pairs == [(str(index), str(index)) for index in range(4)]
    assert compiled.memory_analysis().alias_size_in_bytes == 8 * 4000
    keys, values = compiled(*arguments)
    assert [float(x[0]) for x in keys] == [1, 2, 3, 4]
    assert [float(x[0]) for x in values] == [6, 13, 27, 55]


def test_without_a_boundary_it_is_one():
    mesh = make_mesh(1)
    assert lower(lambda x: x + 1, mesh, *put(mesh, np.ones(2, np.float32))) is None
    whole = jax.jit(lambda x: x + 1).lower(jnp.ones(2))
    assert parts_of(whole) == (whole,)


def test_partial_sums_do_not_cross():
    """The cut is after their sum, a few operations after the boundary; without a sum there is no cut."""
    mesh = make_mesh(2)
    by_input = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    x, weight = (jax.device_put(np.ones((3, 8), np.float32), by_input) for _ in range(2))

    def function(x, weight, *, adds_up):
        share = linear(x, Dense(weight), leaves_shares=True)
        y = launch_boundary(share.astype(jnp.float32))
        return jax.sharding.reshard(y, PartitionSpec(None, None)) * 2 if adds_up else y

    lowered = lower(lambda *args: function(*args, adds_up=True), mesh, x, weight)
    assert [crossing.spec for crossing in lowered.cut.crossing] == [(None, None)]
    np.testing.assert_array_equal(lowered.compile()(x, weight), 16)
    assert lower(lambda x, weight: function(x, weight, adds_up=False), mesh, x, weight) is None


def test_what_crosses_stays_where_it_is():
    mesh = make_mesh(2)
    x = jax.device_put(np.arange(8, dtype=np.float32).reshape(2, 4), NamedSharding(mesh, PartitionSpec(None, "tensor")))
    lowered = lower(lambda x: launch_boundary(x + 1) * 2, mesh, x)
    assert [(crossing.shape, crossing.spec) for crossing in lowered.cut.crossing] == [((2, 4), (None, "tensor"))]
    got = lowered.compile()(x)
    assert got.sharding.spec == PartitionSpec(None, "tensor")
    np.testing.assert_array_equal(got, (np.asarray(x) + 1) * 2)
