"""Fields that a config.json omits have transformers' defaults, and the limits on a config."""

import json
import random

import pytest
from depths import quick_only
from golden_models import GOLDENS
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING

from jaxserve.errors import CheckpointError
from jaxserve.models import FAMILIES, get_family

NUM_SUBSETS = 20
OF_SEVERAL = ("gemma3_windows", "gemma4_experts", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v")
"""Goldens of multimodal models, whose config has others inside."""


def completed(fields):
    """Return the fields of a config.json as transformers saves it after reading `fields`."""
    given = {name: value for name, value in fields.items() if name not in ("model_type", "quantization_config")}
    # As transformers reads an infinite number that it has saved.
    given = json.loads(json.dumps(given).replace('{"__float__": "Infinity"}', "Infinity"))
    return json.loads(json.dumps(CONFIG_MAPPING[fields["model_type"]](**given).to_dict()))


def read(fields):
    """Return the family's Config, or the error about the fields."""
    try:
        return get_family(fields).config(fields)
    except CheckpointError as error:
        return str(error)


def type_of(path):
    return json.loads((path / "config.json").read_text())["model_type"]


OF_ONE_CONFIG = [path for path in GOLDENS if not path.name.startswith(OF_SEVERAL) and type_of(path) in CONFIG_MAPPING]
"""Goldens without other configs inside, of families that transformers has under the same name."""
CASES = quick_only(OF_ONE_CONFIG, *{type_of(path): path for path in reversed(OF_ONE_CONFIG)}.values())
"""All of them, as parameters of tests: a family's further ones are slow."""


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() & CONFIG_MAPPING.keys()))
def test_a_config_that_says_nothing(model_type):
    # These have no number of experts by default, and cannot be built without one.
    needed = {"deepseek_v2": {"num_experts_per_tok": 6}}
    needed["dots1"] = needed["deepseek_v2"] | {"n_routed_experts": 9, "n_shared_experts": 1}
    needed["glm4_moe"] = {"head_dim": 128}  # hidden_size is no multiple of the heads
    fields = {"model_type": model_type} | needed.get(model_type, {})
    config = read(fields)
    assert not isinstance(config, str), config
    assert config == read(completed(fields))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name)
def test_a_config_that_leaves_out_some_fields(path):
    fields = json.loads((path / "config.json").read_text())
    names = sorted(fields.keys() - {"model_type"})
    rng = random.Random(path.name)
    subsets = [[name] for name in names] + [rng.sample(names, rng.randint(2, len(names))) for _ in range(NUM_SUBSETS)]
    num_compared = 0
    for left_out in subsets:
        partial = {name: value for name, value in fields.items() if name not in left_out}
        try:
            expected = read(completed(partial))
        except (StrictDataclassError, ValueError, ZeroDivisionError, IndexError):  # transformers refuses it
            continue
        if isinstance(expected, str):  # what transformers would fail with later
            continue
        assert read(partial) == expected, left_out
        num_compared += 1
    assert num_compared > len(names) // 2


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name)
def test_other_names_of_fields(path):
    fields = json.loads((path / "config.json").read_text())
    for other, name in CONFIG_MAPPING[fields["model_type"]].attribute_map.items():
        if name in fields:
            renamed = {key: value for key, value in fields.items() if key != name} | {other: fields[name]}
            assert read(renamed) == read(completed(renamed)) == read(fields), other
