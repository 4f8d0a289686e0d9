"""Numbers of configs that make no sense are refused by the name of their key, before anything is listed by them."""

import json
import shutil
import time

import gguf_files
import numpy as np
import pytest
from golden_models import GOLDENS
from safetensors.numpy import load_file

from jaxserve.config import EngineConfig
from jaxserve.convert import convert
from jaxserve.engine.startup import start_engine
from jaxserve.errors import CheckpointError
from jaxserve.loading.bounds import MAXIMA
from jaxserve.loading.json_files import read_config
from jaxserve.loading.store_manifest import MANIFEST
from jaxserve.loading.weights import load_config
from jaxserve.models import get_family
from jaxserve.overview import needs
from jaxserve.tokenizer import Tokenizer

ONE_OF_EACH = {json.loads((path / "config.json").read_text())["model_type"]: path for path in GOLDENS}
SECONDS = 20.0
"""Processor time. A refusal takes milliseconds; a loop over ten million layers takes minutes."""


def copy_with(path, folder, **changes):
    copy = shutil.copytree(path, folder / "model")
    fields = json.loads((copy / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps(fields))  # writes Infinity and NaN as they are
    return copy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("num_hidden_layers", value) for value in (10_000_000, 1025, 2**63, 1e400)],
        *[("vocab_size", value) for value in (10**30, 2**31, float("inf"), float("nan"))],
        *[("rope_theta", value) for value in (float("inf"), float("nan"), 10**400, 1e300)],
        *[("rms_norm_eps", value) for value in (float("inf"), 1e308, 10**40)],
        *[("max_position_embeddings", value) for value in (2**31 - 1, 10**12)],
        *[("hidden_size", 2**62), ("num_attention_heads", 10**9), ("num_key_value_heads", 10**9)],
        *[("head_dim", 10**10), ("intermediate_size", 10**30), ("num_labels", 10**12)],
    ],
)
def test_numbers_of_a_config(tmp_path, name, value):
    path = copy_with(ONE_OF_EACH["llama"], tmp_path, **{name: value})
    began = time.thread_time()
    for read in (
        lambda: needs(EngineConfig(model=str(path)), memory=2**30),
        lambda: convert(str(path), tmp_path / "store", progress=False),
        lambda: start_engine(EngineConfig(model=str(path), warmup="none"), mesh=None, progress=False),
    ):
        with pytest.raises(CheckpointError, match=rf"config\.json: {name} must be "):
            read()
    assert time.thread_time() - began < SECONDS


@pytest.mark.parametrize("parameters", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("factor", float("inf")), ("factor", 1e9), ("original_max_position_embeddings", 10**30), ("rope_theta", 1e200)],
)
def test_numbers_of_rotary_embedding(tmp_path, parameters, name, value):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64} | {name: value}
    changes = {"rope_theta": 1e4, "rope_parameters": None, parameters: rope}
    path = copy_with(ONE_OF_EACH["llama"], tmp_path, **changes)
    with pytest.raises(CheckpointError, match=rf"{name} must be "):
        needs(EngineConfig(model=str(path)), memory=2**30)


@pytest.mark.parametrize("model_type", ONE_OF_EACH)
def test_every_number_of_every_family_is_bounded(model_type):
    fields = read_config(ONE_OF_EACH[model_type] / "config.json")
    family = get_family(fields)
    config = family.config(fields)
    complaints = {}
    for name, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        for senseless in (10**30, float("inf"), float("nan"), 10**400):
            try:
                assert family.config(fields | {name: senseless}) == config, f"{name} is not checked"
            except CheckpointError as error:
                complaints[name] = str(error)
    assert [name for name, complaint in complaints.items() if name not in complaint] == []
    assert ("padded_vocab_size" if model_type == "chatglm" else "vocab_size") in complaints


@pytest.mark.parametrize("model_type", ONE_OF_EACH)
def test_the_largest_numbers_are_listed_in_seconds(model_type):
    fields = read_config(ONE_OF_EACH[model_type] / "config.json")
    family = get_family(fields)
    for name in fields.keys() & MAXIMA.keys() - {"num_hidden_layers", "n_layer"}:  # slow with every call checked
        began = time.thread_time()
        try:
            config = family.config(fields | {name: int(MAXIMA[name])})
            family.param_specs(config)
            family.kv_specs(config)
        except CheckpointError:
            pass
        assert time.thread_time() - began < SECONDS, name


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("block_count", value) for value in (10_000_000, 2**31 - 1)],
        *[("rope.freq_base", value) for value in (float("inf"), float("nan"))],
        *[("attention.layer_norm_rms_epsilon", float("inf")), ("context_length", 2**31 - 1)],
        *[("attention.head_count", 2**31 - 1), ("embedding_length", 2**31 - 1)],
        *[("rope.scaling.factor", float("inf")), ("attention.head_count_kv", 2**31 - 1)],
    ],
)
def test_numbers_of_gguf_files(tmp_path, key, value):
    path = next(path for path in GOLDENS if path.name == "llama_biases_linear_rope")
    fields = json.loads((path / "config.json").read_text())
    tensors = {name: np.asarray(t, np.float32) for name, t in load_file(path / "model.safetensors").items()}
    gguf_files.write_model(tmp_path / "m.gguf", fields, tensors, metadata={f"llama.{key}": value})
    began = time.thread_time()
    with pytest.raises(CheckpointError, match=rf"llama\.{key} must be "):
        load_config(tmp_path / "m.gguf")
    assert time.thread_time() - began < SECONDS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda manifest: manifest["arrays"]["norm"].update(shape=[10**30]), "norm is float32 .10{30}. and not"),
        (lambda manifest: manifest["arrays"]["norm"].update(shape=[-1]), "norm is float32 .-1. and not"),
        (lambda manifest: manifest["config"].update(num_hidden_layers=10**9), "changed since .* num_hidden_layers"),
        (lambda manifest: manifest.update(format_version=10**30), "format_version is 10{30}"),
        (
            lambda manifest: manifest["file_sizes"].update(dict.fromkeys(manifest["file_sizes"], 10**30)),
            "has .* bytes and not 10{30}",
        ),
    ],
)
def test_numbers_of_manifests(tmp_path, change, message):
    path = ONE_OF_EACH["llama"]
    convert(str(path), tmp_path / "store", dtype="float32", progress=False)
    manifest = json.loads((tmp_path / "store" / MANIFEST).read_text())
    change(manifest)
    (tmp_path / "store" / MANIFEST).write_text(json.dumps(manifest))
    began = time.thread_time()
    with pytest.raises(CheckpointError, match=message):
        start_engine(EngineConfig(model=str(tmp_path / "store"), warmup="none"), mesh=None, progress=False)
    assert time.thread_time() - began < SECONDS


def test_a_tokenizer_beside_a_senseless_config(test_data, tmp_path):
    path = copy_with(test_data / "models" / "stories260K", tmp_path, num_labels=10**12)
    with pytest.raises(CheckpointError, match="num_labels must be finite and at most"):
        Tokenizer.load(path)
