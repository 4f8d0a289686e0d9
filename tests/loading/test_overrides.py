"""Options that take the place of what a model's files say, and formats that they must have."""

import json
import pathlib

import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.frontend import sampling_defaults
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.loading.builtin import resolve_names
from jaxserve.loading.overrides import merged, origin

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("fields", "changes", "expected"),
    [
        ({"a": 1, "b": 2}, {"b": 3, "c": None}, {"a": 1, "b": 3, "c": None}),
        (
            {"a": {"b": {"c": 1, "d": 2}}, "e": [1]},
            {"a": {"b": {"c": 3}}, "e": [2]},
            {"a": {"b": {"c": 3, "d": 2}}, "e": [2]},
        ),
        # The same thing has several names.
        ({"torch_dtype": "float16"}, {"dtype": "float32"}, {"torch_dtype": "float32"}),
        (
            {"rope_scaling": None, "rope_theta": 5.0},
            {"rope_parameters": YARN},
            {"rope_scaling": None, "rope_theta": 5.0, "rope_parameters": YARN},
        ),
        (
            {"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}},
            {"rope_scaling": YARN},
            {"rope_parameters": {"rope_theta": 5.0, **YARN}},
        ),
        (
            {"rope_parameters": {"rope_theta": 5.0}},
            {"rope_theta": 6.0},
            {"rope_theta": 6.0, "rope_parameters": {"rope_theta": 6.0}},
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_scaling": {"type": "linear", "factor": 3.0}},
            {"rope_scaling": {"type": "linear", "factor": 3.0}},
        ),
        # Another kind keeps nothing of the one before.
        ({"rope_scaling": LLAMA3}, {"rope_scaling": YARN}, {"rope_scaling": YARN}),
        ({"rope_scaling": LLAMA3}, {"rope_parameters": {"factor": 2.0}}, {"rope_scaling": LLAMA3 | {"factor": 2.0}}),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        ),
    ],
)
def test_changes_are_merged_under_the_names_that_the_config_has(fields, changes, expected):
    assert merged(fields, changes) == expected


@pytest.fixture
def model(tmp_path):
    """A model directory, without weights."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama", "hidden_size": 8, "rope_scaling": null}')
    (directory / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7, "eos_token_id": [1, 2]}')
    (directory / "tokenizer.json").write_text("{}")
    return directory


def resolved(model, **options):
    config = resolve_names(EngineConfig(model=str(model), load_format="dummy", **options))
    return config, pathlib.Path(config.model)


def test_a_changed_model_is_a_directory_of_links(model, caplog):
    config, folder = resolved(model, hf_overrides={"hidden_size": 16, "odd": 1})
    assert config.hf_overrides is None
    assert folder.name == model.name
    assert json.loads((folder / "config.json").read_text()) == {
        "model_type": "llama",
        "hidden_size": 16,
        "rope_scaling": None,
        "odd": 1,
    }
    assert "config.json has had no odd" in caplog.text
    assert (folder / "tokenizer.json").resolve() == model / "tokenizer.json"
    assert origin(config.model) == origin(str(model)) == str(model)
    assert resolve_names(config) == config
    assert resolve_names(EngineConfig(model=str(model))).model == str(model)


@pytest.mark.parametrize(
    ("options", "defaults", "ends"),
    [
        ({}, {"temperature": 0.5, "top_k": 7}, [1, 2]),
        ({"generation_config": "vllm"}, {}, [1, 2]),
        (
            {"override_generation_config": {"temperature": 0, "max_new_tokens": 9}},
            {"temperature": 0, "top_k": 7, "max_tokens": 9},
            [1, 2],
        ),
        ({"generation_config": "vllm", "override_generation_config": {"top_p": 0.5}}, {"top_p": 0.5}, [1, 2]),
        ({"override_generation_config": {"eos_token_id": 3}}, {"temperature": 0.5, "top_k": 7}, 3),
    ],
)
def test_default_values_of_requests(model, options, defaults, ends):
    _, folder = resolved(model, **options)
    assert sampling_defaults(folder) == defaults
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == ends


def test_default_values_of_requests_from_another_directory(model, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"min_p": 0.25}')
    _, folder = resolved(model, generation_config=str(tmp_path))
    assert sampling_defaults(folder) == {"min_p": 0.25}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            {"override_generation_config": {"temprature": 1, "do_sample": True}},
            "do_sample, temprature is not read, only",
        ),
        ({"generation_config": "/nowhere"}, "generation_config must be auto, vllm or a directory with"),
        ({"hf_overrides": {"architectures": "x"}}, "hf_overrides: architectures must be a list of texts, got 'x'"),
        ({"hf_overrides": {"model_type": "odd"}}, "^hf_overrides: unknown model_type 'odd'"),
        ({"quantization": "awq"}, "quantization is awq, but .* says that its weights are not quantized: leave it out"),
        ({"quantization": "gguf"}, "quantization is gguf, but .* says that its weights are not quantized"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(model, options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        resolved(model, **options)


def test_a_value_out_of_range_is_refused(model):
    _, folder = resolved(model, override_generation_config={"temperature": -1})
    with pytest.raises(CheckpointError, match="temperature must be in"):
        sampling_defaults(folder)


@pytest.mark.parametrize(
    ("said", "names"),
    [
        (
            {"quant_method": "intel/auto-round", "bits": 4, "group_size": 128, "sym": True},
            ["auto-round", "inc"],
        ),
        ({"quant_method": "awq", "bits": 4}, ["awq", "awq_marlin", "moe_wna16"]),
        ({"quant_method": "gptq", "bits": 4}, ["gptq", "gptq_marlin", "moe_wna16"]),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ["bitsandbytes"]),
        ({"quant_method": "fp8"}, ["fp8"]),
        ({"quant_method": "mxfp4"}, ["mxfp4", "gpt_oss_mxfp4"]),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ["modelopt", "modelopt_fp4"]),
        ({"quant_method": "compressed-tensors"}, ["compressed-tensors"]),
    ],
)
def test_a_format_must_be_the_checkpoints_own(model, said, names):
    (model / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "quantization_config": said}))
    for name in names:
        config, folder = resolved(model, quantization=name)
        assert (config.quantization, folder) == (None, model)
    other = "gptq" if said["quant_method"] != "gptq" else "awq"
    with pytest.raises(
        ConfigError, match=f"is {other}, but .* its weights are stored by {said['quant_method']}: leave"
    ):
        resolved(model, quantization=other)


def test_a_gguf_file_has_no_files_to_change(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    config, path = resolved(tmp_path / "a.gguf", quantization="gguf", generation_config="vllm")
    assert (config.quantization, path) == (None, tmp_path / "a.gguf")
    with pytest.raises(ConfigError, match="is a GGUF file"):
        resolved(path, hf_overrides={"a": 1})
