"""Helpers of the sampling tests: requests, their admission into slots, and one compiled function of each kind."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.request import EngineRequest
from jaxserve.sampling import admit, admit_extras, features, has_extras, pack_extras, pack_scalars, record, sample
from jaxserve.sampling_params import SamplingParams

VOCAB = 77
NUM_SLOTS = 6

jit_sample = jax.jit(sample, static_argnames=("plain", "implementation"))
jit_record = jax.jit(record)
jit_admit = jax.jit(admit)
jit_admit_extras = jax.jit(admit_extras)


def make_request(prompt=(1,), *, seed=0, stop_token_ids=(), bad_word_ids=(), **params):
    return EngineRequest(
        request_id="r",
        group_id="r",
        prompt_token_ids=list(prompt),
        params=SamplingParams(**{"max_tokens": 100} | params),
        max_tokens=100,
        stop_token_ids=frozenset(stop_token_ids),
        bad_word_ids=tuple(tuple(word) for word in bad_word_ids),
        seed=seed,
    )


def put(state, slot, request, output=()):
    """Admit one request, which may have generated some tokens already, as the runner does."""
    slots = jnp.array([slot, len(state.scalars)], jnp.int32)  # and a padding row
    rows = np.stack([pack_scalars(request), np.full_like(pack_scalars(request), 9)])
    state = jit_admit(state, slots, jnp.asarray(rows))
    if has_extras(request):
        vocab_size = state.extras.output_counts.shape[1]
        tokens = [*request.prompt_token_ids, *output]
        extras = pack_extras(request, tokens, len(request.prompt_token_ids), vocab_size=vocab_size)
        state = jit_admit_extras(state, jnp.int32(slot), extras)
    return state


def ints(*values):
    return jnp.array(values, jnp.int32)


def union(*requests):
    return jnp.int32(functools.reduce(lambda a, b: a | b, (features(r) for r in requests), 0))


EVERYTHING = make_request(
    (5, 6, 7),
    stop_token_ids=(1, 2, 3),
    bad_word_ids=((4,), (9, 10)),
    repetition_penalty=3.0,
    frequency_penalty=1.0,
    presence_penalty=1.0,
    logit_bias={8: 50.0},
    allowed_token_ids=[1, 2, 8, 11],
    min_tokens=90,
)
