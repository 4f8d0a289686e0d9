"""Paged attention in plain XLA as a GPU without kernels runs it: few turns of loops, for which the host waits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_paged_attention as of_decodes
import test_ragged_prefill_attention as of_prompts

import pallas_kernels.paged_attention.xla as decodes
import pallas_kernels.ragged_prefill_attention.xla as prompts
from jaxserve.execution.programs.spec import MeshSpec
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paging import Pages
from pallas_kernels.paging.xla import chunk_on_a_gpu, runs_on_a_gpu
from pallas_kernels.ragged_prefill_attention import ragged_prefill_attention


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Sizes of a GPU, on this machine's CPU."""
    for module, tests, operation in (
        (decodes, of_decodes, paged_attention),
        (prompts, of_prompts, ragged_prefill_attention),
    ):
        monkeypatch.setattr(module, "runs_on_a_gpu", lambda: True)
        monkeypatch.setattr(tests, "attend", jax.jit(operation, static_argnames="implementation"))


@pytest.mark.parametrize("lens", of_decodes.LENS)
@pytest.mark.parametrize("options", ["plain", "everything"])
def test_rows_with_one_token(on_a_gpu, lens, options):
    of_decodes.test_decode(lens, options)


@pytest.mark.parametrize("mix", of_prompts.MIXES)
@pytest.mark.parametrize("options", ["plain", "window"])
def test_rows_with_several_tokens(on_a_gpu, mix, options):
    of_prompts.test_matches_the_definition(mix, options)


@pytest.mark.parametrize("lens", [[1, 1500, 200], [1024, 1025]])
def test_contexts_of_several_turns(on_a_gpu, monkeypatch, lens):
    arrays, layout = of_decodes.make_case(np.random.default_rng(3), lens, max_blocks=400)
    of_decodes.check(arrays, layout, scale=0.3)


@pytest.mark.parametrize(("num_rows", "expected"), [(1, 1024), (16, 1024), (32, 512), (100, 128), (256, 128)])
def test_positions_of_a_turn(num_rows, expected):
    pool = jnp.zeros((4, 8, 16, 128), jnp.float16)
    assert chunk_on_a_gpu(Pages(pool, pool), num_rows=num_rows, chunk=128) == expected


def test_the_mesh_says_whether_it_is_one_of_gpus():
    assert not runs_on_a_gpu()
    for platform, expected in (("gpu", True), ("cpu", False)):
        mesh = MeshSpec(("tensor",), (1,), "NVIDIA T4", platform, 40).mesh()
        with jax.sharding.use_abstract_mesh(mesh):
            assert runs_on_a_gpu() == expected
