"""The text of multimodal checkpoints: one rule finds its config and its tensors, and leaves out other parts."""

import json
import logging

import jax
import numpy as np
import pytest
from golden_folder import GOLDENS
from golden_models import load_model
from safetensors.numpy import load_file, save_file
from transformers import CONFIG_MAPPING

from jaxserve import overview
from jaxserve.config import EngineConfig
from jaxserve.errors import CheckpointError
from jaxserve.loading.huggingface import load_config
from jaxserve.loading.multimodal import REFUSED, TEXT_OF, WRAPPERS, stored_names, text_fields, text_name
from jaxserve.loading.overrides import with_overrides
from jaxserve.loading.quantization_files import expected_schemes, stored_formats
from jaxserve.models import get_family
from jaxserve.quantization.gptq import GPTQ

TEXTS = {
    "cohere2": "cohere2_windows",
    "deepseek_v3": "deepseek_v3_groups",
    "gemma3_text": "gemma3_two_thetas",
    "gemma3n_text": "gemma3n_shared",
    "gemma4_text": "gemma4_shared",
    "lfm2": "lfm2_tied",
    "llama": "llama_biases_linear_rope",
    "llama4_text": "llama4_chunks",
    "mistral": "mistral_window",
    "qwen2": "qwen2_window",
    "qwen2_5_vl_text": "qwen2_window",
    "qwen2_vl_text": "qwen2_window",
    "qwen3_vl_text": "qwen3_tied",
}
"""Goldens of the texts that wrappers have by default."""
FORMS = {
    "transformers 4": ("language_model.model.", "language_model.lm_head.", "vision_tower."),
    "transformers 5": ("model.language_model.", "lm_head.", "model.visual."),
    "no prefix": ("model.", "lm_head.", "visual."),
    "text model": ("model.text_model.", "lm_head.", "model.connector."),
    "no model": ("language_model.", "language_model.lm_head.", "multi_modal_projector."),
}


def write(folder, fields, tensors):
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors")


def wrap(folder, name, model_type, form="transformers 5", **outer):
    """Write a golden model as the text of a multimodal checkpoint."""
    model, head, tower = FORMS[form]
    fields = json.loads((GOLDENS / name / "config.json").read_text())
    tensors = load_file(GOLDENS / name / "model.safetensors")
    prefixes = {"model.": model, "lm_head.": head}
    renamed = {
        prefixes[prefix] + tensor.removeprefix(prefix): value
        for tensor, value in tensors.items()
        for prefix in prefixes
        if tensor.startswith(prefix)
    }
    towers = {f"{tower}{index}.weight": np.ones((3, 2), np.float32) for index in range(3)}
    vision = {"vision_config": {"hidden_size": 3, "use_causal_mask": False}}
    key = WRAPPERS[model_type].key
    write(folder, {"model_type": model_type, key: fields} | vision | outer, renamed | towers)


def params_of(folder):
    params, config, _, _ = load_model(folder)
    return config, params


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model_type", ["gemma3", "mistral3", "kimi_k25"])
def test_names_of_all_forms(tmp_path, caplog, model_type, form):
    golden = TEXTS[WRAPPERS[model_type].text]
    wrap(tmp_path, golden, model_type, form)
    with caplog.at_level(logging.INFO):
        config, params = params_of(tmp_path)
    expected_config, expected = params_of(GOLDENS / golden)
    assert config == expected_config
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    part = FORMS[form][2].removeprefix("model.").rstrip(".")
    assert f"{model_type} is served for text only; tensors left out: 3 of {part}" in caplog.text


@pytest.mark.parametrize("model_type", [name for name, each in WRAPPERS.items() if each.text in TEXTS])
def test_all_wrappers(tmp_path, model_type):
    golden = TEXTS[WRAPPERS[model_type].text]
    wrap(tmp_path, golden, model_type)
    config, params = params_of(tmp_path)
    expected_config, expected = params_of(GOLDENS / golden)
    assert config == expected_config
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    needs = overview.needs(EngineConfig(model=str(tmp_path)), memory=2**30)
    assert needs.model_type == f"{model_type}, text only, by {load_config(GOLDENS / golden)['model_type']}"


def family_config(fields):
    return get_family(fields).config(fields)


@pytest.mark.parametrize("model_type", sorted(WRAPPERS.keys() & CONFIG_MAPPING.keys()))
def test_a_text_that_says_nothing_has_the_defaults_of_transformers(model_type):
    text = {"head_dim": 128} if model_type == "glm4v_moe" else {}  # hidden_size is no multiple of its heads
    fields = {"model_type": model_type, "text_config": text}
    completed = json.loads(json.dumps(CONFIG_MAPPING[model_type](text_config=text).to_dict()))
    # The inner default of tie_word_embeddings is no default of the whole.
    found, expected = (text_fields(each) | {"tie_word_embeddings": False} for each in (fields, completed))
    assert family_config(found) == family_config(expected)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_older_configs_have_the_fields_of_the_text_beside_the_others(model_type):
    text = json.loads((GOLDENS / "qwen2_window" / "config.json").read_text())
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 2]}, "rope_parameters": None, "rope_theta": 500.0}
    flat = {**text, "model_type": model_type, "vision_config": {"hidden_size": 3}, **rope}
    config = family_config(text_fields(flat))
    assert config == family_config(text | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}})


def test_a_tied_head_may_have_the_name_of_lfm2():
    fields = {"model_type": "lfm2_vl", "tie_embedding": False, "text_config": {"tie_embedding": False}}
    assert family_config(text_fields(fields)).tie_word_embeddings is False
    assert family_config(text_fields(fields | {"tie_embedding": True})).tie_word_embeddings is True


@pytest.mark.parametrize(("outer", "inner", "is_tied"), [(None, True, True), (True, None, True), (False, None, False)])
def test_the_tied_head_may_be_said_in_either(outer, inner, is_tied):
    fields = {"model_type": "qwen3_vl", "tie_word_embeddings": outer, "text_config": {"tie_word_embeddings": inner}}
    assert text_fields(fields)["tie_word_embeddings"] is is_tied


def test_a_head_of_its_own_wins_over_the_config(tmp_path):
    wrap(tmp_path, "llama_biases_linear_rope", "llava", "transformers 4", tie_word_embeddings=True)
    config, _ = params_of(tmp_path)
    assert not config.tie_word_embeddings


@pytest.mark.parametrize("outer", [{"eos_token_id": [1, 106]}, {}])
@pytest.mark.parametrize("dtype", ["dtype", "torch_dtype"])
def test_fields_that_may_stand_in_either(outer, dtype):
    inner = {"eos_token_id": 7, "torch_dtype": "float32"} if outer else {"eos_token_id": [1, 106], dtype: "bfloat16"}
    outer = outer and outer | {dtype: "bfloat16"}
    text = text_fields({"model_type": "mistral3", "text_config": inner, **outer})
    assert text["eos_token_id"] == [1, 106]
    assert [text[name] for name in ("dtype", "torch_dtype") if name in text] == ["bfloat16"]


INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
    "ignore": ["language_model.lm_head", "re:.*vision_tower.*", "model.language_model.layers.0.mlp.down_proj"],
}


@pytest.mark.parametrize("is_inside", [True, False])
def test_quantization_may_be_described_in_either_and_lists_name_the_whole(tmp_path, is_inside):
    described = {"quantization_config": INT4}
    text = text_fields(
        {"model_type": "kimi_k25", "text_config": described if is_inside else {}} | ({} if is_inside else described)
    )
    assert stored_formats(tmp_path, text)
    expected = expected_schemes(tmp_path, text)
    assert expected is not None
    schemes = {
        name: expected.scheme(name, 64) for name in ("lm_head", *(f"model.layers.{i}.mlp.down_proj" for i in (0, 1)))
    }
    assert [name for name, scheme in schemes.items() if scheme is None] == ["lm_head", "model.layers.0.mlp.down_proj"]


@pytest.mark.parametrize("stored", ["model.language_model.", "language_model.model.", "model."])
@pytest.mark.parametrize("named", ["model.language_model.", "language_model.model."])
def test_modules_of_autoround_may_be_stored_under_other_names_than_it_lists(tmp_path, stored, named):
    said = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}
    said["extra_config"] = {f"{named}layers.0.mlp.down_proj": {"bits": 8}, "visual.blocks.0.mlp": {"bits": 16}}
    (found,) = stored_formats(
        tmp_path, text_fields({"model_type": "qwen3_vl", "text_config": {}, "quantization_config": said})
    )
    assert isinstance(found, GPTQ)
    assert [found.of(f"{stored}layers.{layer}.mlp.down_proj").bits for layer in (0, 10)] == [8, 4]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gemma3"}, "text_config must be an object"),
        ({"model_type": "internvl_chat", "text_config": {}}, "llm_config must be an object"),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "ministral9"}},
            "'ministral9' of the text in 'mistral3'",
        ),
        *(({"model_type": name, "text_config": {}}, REFUSED[name]) for name in REFUSED),
        ({"model_type": "gemma9", "text_config": {"model_type": "llama"}}, "unknown model_type 'gemma9'"),
        (
            {"model_type": "llava", "quantization_config": INT4, "text_config": {"quantization_config": {"bits": 4}}},
            "contradict",
        ),
        ({"model_type": "llava", "tie_word_embeddings": "yes", "text_config": {}}, "tie_word_embeddings"),
        ({"model_type": "llava", "text_config": {"layer_types": 3}}, "layer_types must be a list"),
        (
            {"model_type": "mistral3", "text_config": {"layer_types": ["sliding_attention", "full_attention"]}},
            "layer_types is not supported in text_config",
        ),
    ],
)
def test_what_is_refused(tmp_path, fields, message):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=message):
        load_config(tmp_path)


@pytest.mark.parametrize("extra", ["model.strange.weight", "model.layers.0.self_attn.rotation.weight"])
def test_a_tensor_of_no_known_part_is_refused(tmp_path, extra):
    wrap(tmp_path, "llama_biases_linear_rope", "llava")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {extra: np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=extra):
        params_of(tmp_path)


def test_two_tensors_of_one_name_are_refused(tmp_path):
    wrap(tmp_path, "llama_biases_linear_rope", "llava")
    tensors = load_file(tmp_path / "model.safetensors")
    twice = {"language_model.lm_head.weight": tensors["lm_head.weight"]}
    save_file(tensors | twice, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"two tensors are lm_head\.weight"):
        params_of(tmp_path)


@pytest.mark.parametrize(
    ("stored", "module"),
    [
        ("language_model.lm_head", "lm_head"),
        ("language_model.model.norm", "model.norm"),
        ("model.language_model.layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj"),
        ("model.text_model.norm", "model.norm"),
        ("model.norm", "model.norm"),
    ],
)
def test_lists_may_have_any_name_that_a_tensor_has(stored, module):
    assert text_name(f"{stored}.weight") == f"{module}.weight"
    assert stored in stored_names(module)


@pytest.mark.parametrize(
    "module",
    [
        *("model.embed_vision.embedding_projection", "model.embed_audio.embedding_projection"),  # Gemma 4
        *("model.vision_embedder.patch_dense", "model.audio_tower.output_proj", "vision_model.layernorm_pre"),
        *("model.projector.readout.0", "model.visual.merger.norm", "multi_modal_projector.linear_1"),
    ],
)
def test_modules_of_images_and_sound_are_of_no_text(module):
    assert text_name(f"{module}.weight") is None


def test_overrides_of_the_text_reach_it(tmp_path):
    wrap(tmp_path, "llama_biases_linear_rope", "llava")
    changes = {"max_position_embeddings": 77, "eos_token_id": 5}
    fields = load_config(with_overrides(EngineConfig(model=str(tmp_path), hf_overrides=changes)).model)
    assert (fields["max_position_embeddings"], fields["eos_token_id"], fields[TEXT_OF]) == (77, 5, "llava")


def test_experts_of_a_layer_in_one_tensor(tmp_path):
    """Published checkpoints of Qwen 3.5 have them so, quantized ones do not."""
    golden = GOLDENS / "qwen3_5_moe_tied"
    tensors, fused = load_file(golden / "model.safetensors"), {}
    for layer in (0, 1):
        prefix = f"model.language_model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([tensors.pop(f"{prefix}.{index}.{name}.weight") for index in range(5)])
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        fused |= {f"{prefix}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{prefix}.down_proj": down}
    fields = json.loads((golden / "config.json").read_text())
    write(tmp_path, fields, tensors | fused)
    jax.tree.map(np.testing.assert_array_equal, params_of(tmp_path)[1], params_of(golden)[1])
    for found in ([0, 1, 2, 3], [0, 1, 2, 3, 4, 0]):
        write(tmp_path, fields, tensors | {name: tensor[found] for name, tensor in fused.items()})
        with pytest.raises(CheckpointError, match=rf"_proj has the shape \[{len(found)}, .*must be 5 experts"):
            params_of(tmp_path)


@pytest.mark.parametrize("name", ["gemma4_experts", "llama4_chunks"])
def test_experts_one_by_one(tmp_path, name):
    """Published checkpoints have them in one tensor, Llama 4's with inputs before outputs; quantized ones do not."""
    tensors, apart = load_file(GOLDENS / name / "model.safetensors"), {}
    for whole in [each for each in tensors if each.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
        module, _, part = whole.rpartition(".")
        for index, matrix in enumerate(tensors.pop(whole)):
            matrix = matrix.T if "feed_forward" in module else matrix
            parts = {"gate_proj": matrix[: len(matrix) // 2], "up_proj": matrix[len(matrix) // 2 :]}
            for own, values in (parts if part == "gate_up_proj" else {part: matrix}).items():
                apart[f"{module}.{index}.{own}.weight"] = np.ascontiguousarray(values)
    write(tmp_path, json.loads((GOLDENS / name / "config.json").read_text()), tensors | apart)
    jax.tree.map(np.testing.assert_array_equal, params_of(tmp_path)[1], params_of(GOLDENS / name)[1])
