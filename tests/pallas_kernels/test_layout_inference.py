"""The inference of layouts finds what jax's own finds, in a third of the time."""

import contextlib
from typing import NamedTuple

import jax
import pytest
from depths import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.mosaic.gpu import constraints as cs
from jax.experimental.mosaic.gpu import fragmented_array as fa
from step_specs import make_spec

from jaxserve.bench.shapes import LLAMA_3_8B
from jaxserve.execution.programs.builder import StepBuilder
from jaxserve.layers.sharding import with_explicit_axes
from pallas_kernels import jax_internals
from pallas_kernels.deviceless import h200_mesh
from pallas_kernels.layout_inference import JAXS, infer_layouts_faster

SHAPE = (128, 128)


class Key(NamedTuple):
    """What a variable stands for: a value in registers."""

    name: int
    shape: tuple[int, int] = SHAPE
    memory_space: cs.MemorySpace = cs.MemorySpace.REG


@contextlib.contextmanager
def jaxs_inference():
    """Infer as jax does."""
    for (owner, name), function in JAXS.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        infer_layouts_faster()


VARIABLES = st.builds(lambda name: cs.Variable(Key(name)), st.integers(0, 7))
LAYOUTS = st.sampled_from([fa.WGMMA_LAYOUT, fa.WGSplatFragLayout(SHAPE), fa.WGStridedFragLayout(SHAPE, 2)])
CONSTANTS = st.builds(cs.RegisterLayout, LAYOUTS)
EXPRESSIONS = st.one_of(VARIABLES, VARIABLES, VARIABLES, CONSTANTS)
CONSTRAINTS = st.one_of(
    st.builds(cs.Equals, EXPRESSIONS, EXPRESSIONS),
    st.builds(cs.Relayout, EXPRESSIONS, EXPRESSIONS, st.just(16), st.booleans()),
    st.builds(cs.NotOfType, VARIABLES, st.just(fa.WGSplatFragLayout)),
    st.builds(cs.Divides, VARIABLES, st.sampled_from([(64, 64), (128, 32), (8, 8)])),
)
ASSIGNMENTS = st.dictionaries(VARIABLES, CONSTANTS, max_size=1)


def reduced(assignments, constraints, tried):
    """Reduce a system, as at the beginning of the search, then with one more layout, as in each step of it."""
    system = cs.reduce(cs.ConstraintSystem(dict(assignments), list(constraints)))
    system = cs.ConstraintSystem(dict(tried)) & system
    if isinstance(system, cs.ConstraintSystem):
        system = cs.reduce(system)
    return None if isinstance(system, cs.Unsatisfiable) else (system.assignments, system.constraints)


@settings(max_examples=examples(300))
@given(ASSIGNMENTS, st.lists(CONSTRAINTS, max_size=12), ASSIGNMENTS)
def test_systems_are_reduced_to_the_same(assignments, constraints, tried):
    found = reduced(assignments, constraints, tried)
    with jaxs_inference():
        assert found == reduced(assignments, constraints, tried)


@settings(max_examples=examples(100))
@given(st.lists(CONSTRAINTS, max_size=12))
def test_the_same_variables_are_equal(constraints):
    system = cs.ConstraintSystem({}, constraints)
    found = cs.compute_transitively_equal_vars(system)
    with jaxs_inference():
        expected = cs.compute_transitively_equal_vars(system)
    assert {one: set(others) for one, others in found.items()} == {one: set(others) for one, others in expected.items()}


@pytest.mark.slow
def test_a_program_is_the_same(monkeypatch):
    """With both kinds of attention of a step of prompts."""
    dialect, name = jax_internals.mosaic_gpu_dialect, "get_or_set_dump_options"
    monkeypatch.setattr(dialect, name, getattr(dialect, name))  # which naming changes
    jax_internals.name_kernels_by_content()
    sizes = {"max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 512}
    spec = make_spec(LLAMA_3_8B | {"num_hidden_layers": 1}, **sizes)

    def lower():
        jax.clear_caches()
        builder = StepBuilder(spec, with_explicit_axes(h200_mesh((1,), ("tensor",))))
        return builder.lower(builder.shapes.largest, 1000).as_text()

    found = lower()
    with jaxs_inference():
        assert found == lower()
