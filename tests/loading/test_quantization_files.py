"""Whatever a checkpoint's JSON files say about its weights is understood, or refused by name, before a download."""

import json
import shutil

import pytest
from golden_models import GOLDENS

from jaxserve.config import EngineConfig
from jaxserve.convert import convert
from jaxserve.errors import CheckpointError
from jaxserve.loading.huggingface import load_config
from jaxserve.loading.quantization_files import resolve_kv_cache_dtype
from jaxserve.overview import needs

LLAMA = next(path for path in GOLDENS if path.name == "llama_untied")
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "MIXED_PRECISION"}}
FILES = [
    ("hf_quant_config.json", MODELOPT, "hf_quant_config.json: quantized_layers must be objects by module"),
    ("quantize_config.json", {"bits": 3, "group_size": 128}, "quantize_config.json: bits 3 is not supported"),
    ("quant_config.json", {"w_bit": 4, "version": "GEMV"}, "quant_config.json: version 'GEMV' is not supported"),
    ("quantization_config.json", {"quant_method": "quark"}, "quantization_config.json is 'quark'"),
    ("quantization_map.json", {"lm_head": "qint8"}, "quantization_map.json is 'quanto'"),
    ("config_quant.json", {"bits": 4}, "config_quant.json may say how weights are quantized"),
    ("hqq_config.json", {"nbits": 4}, "hqq_config.json may say how weights are quantized"),
    ("adapter_config.json", {"peft_type": "LORA"}, "adapter_config.json: adapters are not supported: merge it"),
]
FIELDS = [
    ("quantization_config", {"quant_method": "aqlm"}, "quantization_config in its config.json is 'aqlm'"),
    ("quantization_config", {"bits": 4}, "quantization_config in its config.json is None"),
    ("quantization_config", {"quant_method": "mxfp4"}, "and gpt_oss in mxfp4: .* is 'mxfp4'"),
    ("compression_config", {"format": "x"}, "compression_config in its config.json: config_groups must be an object"),
    ("quantization", {"bits": 4, "group_size": 64}, "quantization in its config.json is 'mlx'"),
    ("quant_config", {"w_bit": 4}, "quant_config of its config.json may say how weights are quantized"),
    ("bnb_quantization_config", {"x": 1}, "bnb_quantization_config of its config.json may say"),
    ("load_in_4bit", True, "load_in_4bit of its config.json may say"),
    ("sparsity_config", {"format": "x"}, "sparsity_config of its config.json may say"),
    ("text_config", {"quantization_config": {"quant_method": "fp8"}}, "text_config.quantization_config of its config"),
    ("quantization", "int4", "quantization must be an object, got 'int4'"),
]


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(LLAMA, tmp_path / "model")


def refused(model, folder, message):
    for read in (
        lambda: load_config(model),
        lambda: needs(EngineConfig(model=str(model)), memory=2**30),
        lambda: convert(str(model), folder / "store", progress=False),
    ):
        with pytest.raises(CheckpointError, match=message) as failure:
            read()
        assert "\n" not in str(failure.value)


@pytest.mark.parametrize(("name", "content", "message"), FILES)
def test_files_beside_the_config(model, tmp_path, name, content, message):
    (model / name).write_text(json.dumps(content))
    refused(model, tmp_path, message)


@pytest.mark.parametrize(("name", "content", "message"), FIELDS)
def test_fields_of_the_config(model, tmp_path, name, content, message):
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(fields | {name: content}))
    refused(model, tmp_path, message)


@pytest.mark.parametrize(
    "content", [{"quantization": {"quant_algo": None, "kv_cache_quant_algo": None}}, {"quant_algo": None}]
)
def test_a_file_that_names_no_algorithm_leaves_weights_as_they_are(model, content):
    (model / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}} | content))
    assert load_config(model) == load_config(LLAMA)


def in_config(**said):
    return {"quantization_config": {"quant_method": "compressed-tensors"} | said}


@pytest.mark.parametrize(
    ("fields", "algorithm", "dtype", "line"),
    [
        (in_config(kv_cache_scheme={"num_bits": 8, "type": "float"}), None, "fp8", "kv_cache_dtype is fp8"),
        (in_config(kv_cache_scheme={"num_bits": 8, "type": "float"}), "fp8", "fp8", "kv_cache_dtype is fp8"),
        (in_config(kv_cache_scheme={"num_bits": 8, "type": "int"}), None, "int8", "kv_cache_dtype is int8"),
        (in_config(kv_cache_scheme={"num_bits": 4, "type": "float"}), None, "auto", "which is not supported"),
        (in_config(kv_cache_scheme=None), None, "auto", ""),
        ({}, "FP8", "fp8", "as hf_quant_config.json: kv_cache_quant_algo says"),
        ({}, "NVFP4", "auto", "kv_cache_quant_algo is 'NVFP4', which is not supported"),
    ],
)
def test_auto_is_what_is_said_of_the_kv_cache(model, caplog, fields, algorithm, dtype, line):
    if algorithm is not None:
        (model / "hf_quant_config.json").write_text(
            json.dumps({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": algorithm}})
        )
    with caplog.at_level("INFO"):
        assert resolve_kv_cache_dtype("auto", model, fields) == dtype
        assert line in caplog.text
        assert resolve_kv_cache_dtype("bfloat16", model, fields) == "bfloat16"
    assert dtype == "auto" or "--kv-cache-dtype is bfloat16, which counts" in caplog.text


def test_keys_and_values_alone_may_be_quantized(model):
    said = in_config(config_groups={}, format="dense", kv_cache_scheme={"num_bits": 8, "type": "float"})
    (model / "config.json").write_text(json.dumps(load_config(LLAMA) | said))
    found = needs(EngineConfig(model=str(model)), memory=2**30)
    assert found.kv_dtype == "float8_e4m3fn"
    assert found.held_bytes == found.weight_bytes["float32"]


def test_contradictions_about_the_kv_cache_are_refused(model):
    (model / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "INT8"}})
    )
    fields = in_config(kv_cache_scheme={"num_bits": 8, "type": "float"})
    with pytest.raises(CheckpointError, match="contradict each other: choose a --kv-cache-dtype"):
        resolve_kv_cache_dtype("auto", model, fields)


def test_empty_fields_say_nothing(model):
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(fields | {"quantization_config": {}, "compression_config": None}))
    assert load_config(model)["vocab_size"] == fields["vocab_size"]
