"""Each field of a config.json that transformers reads changes what is computed as it does there, or is refused.

`goldens/variations.py` has other values of each field, `variations.json` what transformers computes with them (`make
goldens ONLY=variations`). Quick tests compare configs: a row that changes transformers' logits and leaves a family's
Config as it is was read over. Slow ones compute the logits, a row's with a few models: most readers are shared.
"""

import collections
import functools
import json
import pathlib
import shutil
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_folder import GOLDENS
from naive import naive_logits
from transformers import GenerationConfig
from variations import FIELDS, GENERATION, changed, rows

from jaxserve.engine.frontend import sampling_defaults
from jaxserve.errors import CheckpointError
from jaxserve.loading.generation_fields import NEUTRAL, log_what_is_not_followed
from jaxserve.loading.huggingface import load_config, load_params
from jaxserve.loading.json_files import eos_token_ids
from jaxserve.loading.model_types import MODEL_TYPES
from jaxserve.models import get_family, with_context

VARIATIONS = json.loads((pathlib.Path(__file__).parents[1] / "goldens" / "variations.json").read_text())
TOLERANCE = 1e-4
MODELS_A_ROW = 2
"""Number of models that compute a row's logits. Every model's Config is compared, and readers are shared: all of them
would take half an hour of processor time. Raise it when a reader that they share is rewritten.
"""
NOT_VARIED = {
    *("kimi_k2", "qwen3_vl_moe_text", "qwen3_5_text", "qwen3_5_moe_text", "mimo", "qwen", "chatglm", "baichuan"),
    *("bailing_moe", "bailing_moe_v2", "mistral4", "youtu", "granitemoeshared", "iquestcoder", "vaultgemma"),
}
"""Families that transformers' AutoModelForCausalLM does not have under these names: the first two are DeepSeek V3 and
Qwen 3 with experts, Qwen 3.5 has the layers of Qwen 3 Next, MiMo is Qwen 2, Mistral 4 is in Mistral 3 only, and the
others have goldens of an implementation of our own. Transformers changes the embedding of Youtu's padding token; the
last three are read as Granite MoE, Llama and Gemma 2.
"""


def served(directory):
    """Return the family and the Config of a directory, None if it is refused."""
    try:
        fields = load_config(directory)
        family = get_family(fields)
        return family, family.config(fields)
    except CheckpointError:
        return None


class Varied:
    """A golden model in a directory of its own, whose config.json is changed."""

    def __init__(self, name, folder):
        self.golden, self.folder = GOLDENS / name, folder
        self.fields = json.loads((self.golden / "config.json").read_text())
        self.outcomes = VARIATIONS["models"][name]
        self.name = name
        self.rows = rows(self.fields)
        for path in self.golden.glob("model*"):
            shutil.copyfile(path, folder / path.name)
        self.base = served(self.golden)

    def served(self, change):
        (self.folder / "config.json").write_text(json.dumps(changed(self.fields, change)))
        return served(self.folder)

    def logits(self, family, config):
        """Return the logits of the directory as it is, None if its weights do not fit."""
        mesh = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])
        specs = family.param_specs(config)
        try:
            params = load_params(self.folder, specs, dtype=np.dtype(np.float32), mesh=mesh, progress=False)
        except CheckpointError:
            return None
        token_ids = jnp.asarray(np.load(self.golden / "golden.npz")["token_ids"])
        with jax.set_mesh(mesh):  # rotations of transformers are those of the text's length
            return np.asarray(naive_logits(params, with_context(config, len(token_ids)), family, token_ids))


@pytest.fixture(params=VARIATIONS["models"])
def varied(request, tmp_path):
    return Varied(request.param, tmp_path)


def test_all_families_are_varied_and_all_fields_that_transformers_reads():
    families = {json.loads((GOLDENS / name / "config.json").read_text())["model_type"] for name in VARIATIONS["models"]}
    assert families == MODEL_TYPES - NOT_VARIED
    assert {"hidden_act", "layer_types", "rope_parameters", "sliding_window"} < set(VARIATIONS["read"]) < set(FIELDS)


def test_no_field_that_changes_the_logits_is_read_over(varied):
    """A tensor that is missing or left over is refused when weights are loaded, so a Config that is equal is enough."""
    assert len(varied.rows) == varied.outcomes["num_rows"], "make goldens ONLY=variations"
    changes = [varied.rows[label] for label in varied.outcomes["changed"]]
    read_over = [change for change in changes if varied.served(change) == varied.base]
    assert read_over == []


@functools.cache
def computed_rows():
    """Return the rows, as (model, label), whose logits are computed: of those where transformers' logits change, and of
    those where only a Config may, `MODELS_A_ROW` models each, spread by a hash over all that have the row.
    """
    models = collections.defaultdict(list)
    for name, outcomes in VARIATIONS["models"].items():
        for label in rows(json.loads((GOLDENS / name / "config.json").read_text())).keys() - outcomes["refused"]:
            models[label, label in outcomes["changed"]].append(name)
    return {
        (name, label)
        for (label, _), names in models.items()
        for name in sorted(names, key=lambda name: zlib.crc32(f"{name} {label}".encode()))[:MODELS_A_ROW]
    }


@pytest.mark.slow
def test_logits_change_as_those_of_transformers(varied):
    """Also where transformers changes nothing and a Config does."""
    computed = {varied.base: varied.logits(*varied.served({}))}
    largest = np.abs(computed[varied.base]).max()
    wrong = []
    for label, change in varied.rows.items():
        if (varied.name, label) not in computed_rows() or (found := varied.served(change)) is None:
            continue
        if found not in computed:
            computed[found] = varied.logits(*found)
        if (logits := computed[found]) is None:
            continue
        kept = varied.outcomes["changed"].get(label)
        if kept is None:
            error = np.abs(logits - computed[varied.base]).max() if logits.shape == computed[varied.base].shape else 1e9
        else:
            error = max(abs(logits.flat[index] - value) for index, value in kept)
        if error > TOLERANCE * largest:
            wrong.append((change, float(error / largest)))
    assert wrong == []


@pytest.mark.parametrize("name", VARIATIONS["generation"]["changed"])
def test_what_changes_generation_is_followed_or_said_not_to_be(tmp_path, caplog, name):
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({name: GENERATION[name]}))
    with caplog.at_level("WARNING"):
        log_what_is_not_followed(tmp_path)
    is_followed = bool(sampling_defaults(tmp_path) or eos_token_ids(json.loads(path.read_text()), path))
    assert is_followed != (f"not followed: {name} {GENERATION[name]!r}"[:60] in caplog.text)


HOW_IT_IS_COMPUTED = {
    *("assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind"),
    *("cache_config", "cache_implementation", "compile_config", "continuous_batching_config", "disable_compile"),
    *("is_assistant", "max_cache_len", "max_matching_ngram_size", "num_assistant_tokens", "target_lookbehind"),
    *("num_assistant_tokens_schedule", "prefill_chunk_size", "prompt_lookup_num_tokens", "speculation_type"),
    *("use_mtp", "output_attentions", "output_hidden_states", "output_logits", "output_scores"),
    *("return_dict_in_generate", "transformers_version", "_from_model_config"),
}
"""Fields of generation_config.json about speculation, caches, and what transformers' `generate` returns."""


def test_no_field_of_transformers_generation_is_forgotten():
    assert vars(GenerationConfig()).keys() - HOW_IT_IS_COMPUTED <= GENERATION.keys() | NEUTRAL.keys()


def test_neutral_values_and_other_fields_are_not_logged(tmp_path, caplog):
    neutral = {name: values[0] for name, values in NEUTRAL.items() if values}
    for config in (
        neutral,
        dict.fromkeys(NEUTRAL),
        {"x": 1, "transformers_version": "5"},
        {"max_new_tokens": 5, "max_length": 9},
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
        log_what_is_not_followed(tmp_path)
    assert caplog.text == ""
