"""Fields that a config.json omits have transformers' defaults, and the limits on a config."""

import json
import random

import pytest
from golden_models import GOLDENS
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING

from jaxserve.errors import CheckpointError
from jaxserve.models import FAMILIES, get_family

NUM_SUBSETS = 20
OF_TRANSFORMERS = [
    path for path in GOLDENS if json.loads((path / "config.json").read_text())["model_type"] in CONFIG_MAPPING
]


def completed(fields):
    """Return the fields of a config.json as transformers saves it after reading `fields`."""
    given = {name: value for name, value in fields.items() if name not in ("model_type", "quantization_config")}
    return json.loads(json.dumps(CONFIG_MAPPING[fields["model_type"]](**json.loads(json.dumps(given))).to_dict()))


def read(fields):
    """Return the family's Config, or the error about the fields."""
    try:
        return get_family(fields).Config.from_hf(fields)
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() & CONFIG_MAPPING.keys()))
def test_a_config_that_says_nothing(model_type):
    # DeepSeek V2 has no number of chosen experts by default, and cannot be built without one.
    fields = {"model_type": model_type} | ({"num_experts_per_tok": 6} if model_type == "deepseek_v2" else {})
    config = read(fields)
    assert not isinstance(config, str), config
    assert config == read(completed(fields))


@pytest.mark.parametrize("path", OF_TRANSFORMERS, ids=lambda path: path.name)
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


@pytest.mark.parametrize("path", OF_TRANSFORMERS, ids=lambda path: path.name)
def test_other_names_of_fields(path):
    fields = json.loads((path / "config.json").read_text())
    for other, name in CONFIG_MAPPING[fields["model_type"]].attribute_map.items():
        if name in fields:
            renamed = {key: value for key, value in fields.items() if key != name} | {other: fields[name]}
            assert read(renamed) == read(completed(renamed)) == read(fields), other
