"""The goldens (`make goldens SEED=n`): tiny random models, and the logits that transformers computes with them.

As a script it prints the worst error of every family (`make parity`).
"""

import collections
import os

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from depths import quick_only
from golden_folder import GOLDENS as FOLDER
from golden_weights import POSITIONS, PROMPT_LENGTH
from naive import naive_logits
from paged import chunked_logits

from jaxserve.loading.weights import load_config, load_weights
from jaxserve.models import get_family

GOLDENS = sorted(path.parent for path in FOLDER.glob("*/golden.npz"))
ONE_OF_EACH = list({load_config(path)["model_type"]: path for path in reversed(GOLDENS)}.values())
"""The first golden of each family."""
ONE_OF_EACH_DECODER = list({get_family(load_config(path)).layers: path for path in reversed(GOLDENS)}.values())
"""A golden for each function that runs a family's layers: many families have that of Llama."""
CASES = quick_only(GOLDENS, *ONE_OF_EACH)
"""All goldens, as parameters of tests: a family's further ones are slow."""


def load_model(path):
    """(params, config, family, mesh) of a model in any form, in float32 on one device."""
    fields = load_config(path)
    family = get_family(fields)
    config = family.config(fields)
    mesh = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])
    params = load_weights(path, family.param_specs(config), dtype=np.dtype(np.float32), mesh=mesh, progress=False)
    return params, config, family, mesh


def load_golden(path):
    """(params, config, family, arrays of golden.npz, mesh) of one golden, on one device."""
    *model, mesh = load_model(path)
    return *model, np.load(path / "golden.npz"), mesh


def full_logits(golden):
    """Logits [T, V] from one forward pass over the golden's whole sequence."""
    params, config, family, expected, mesh = golden
    with jax.set_mesh(mesh):
        return np.asarray(naive_logits(params, config, family, jnp.asarray(expected["token_ids"])))


def continued(golden):
    """Return a golden's prompt and its greedy continuation, padded to the length of its whole sequence, so that they
    share its compiled programs; causal attention does not see padding.
    """
    expected = golden[3]
    tokens = [*expected["token_ids"][:PROMPT_LENGTH], *expected["greedy"]]
    return np.pad(tokens, (0, len(expected["token_ids"]) - len(tokens)))


def paged_chunk_logits(golden, token_ids=None):
    """Logits [2, T, V] of `token_ids` [T], by default the golden's whole sequence, over paged KV: the prompt in chunks
    and then decode steps, and the other way round.
    """
    params, config, family, expected, mesh = golden
    token_ids = expected["token_ids"] if token_ids is None else token_ids
    length = len(token_ids)
    prompt_then_decode = [9, 8, 7, *[1] * (length - 24)]
    decode_then_prompt = [2, *[1] * 11, 3, length - 16]
    chunkings = [prompt_then_decode, decode_then_prompt]
    return chunked_logits(params, config, family, token_ids, chunkings, mesh=mesh)


def relative_error(logits, expected):
    """Return the largest difference, in units of the largest logit."""
    return np.abs(logits - expected).max() / np.abs(expected).max()


def golden_error(logits, golden):
    """Return the error of logits [T, V], at the positions whose logits a golden has."""
    expected = golden[3]["logits"]
    assert logits.shape[1] == expected.shape[1]
    return relative_error(logits[POSITIONS], expected)


def print_table():
    """Print one line per family: its goldens, and the worst error among them without and with paged KV."""
    families = collections.defaultdict(list)
    for path in GOLDENS:
        families[load_config(path)["model_type"]].append(path)
    print(f"{'family':<20}{'goldens':>8}{'full':>10}{'paged':>10}   (error, of the largest logit, in float32)")  # noqa: T201
    for model_type, paths in sorted(families.items()):
        full, paged = np.max([errors(load_golden(path)) for path in paths], axis=0)
        print(f"{model_type:<20}{len(paths):>8}{full:>10.1e}{paged:>10.1e}", flush=True)  # noqa: T201
        jax.clear_caches()  # the programs of all families are more mappings than Linux gives a process (65,530)


def errors(golden):
    """Return a golden's worst errors without paged KV and with it."""
    paged = max(golden_error(logits, golden) for logits in paged_chunk_logits(golden))
    return golden_error(full_logits(golden), golden), paged


if __name__ == "__main__":
    print_table()
