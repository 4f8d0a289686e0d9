"""GGUF files that are damaged, in parts, or of what is not served: all that is wrong is named."""

import json

import gguf_files
import jax
import numpy as np
import pytest
from golden_models import load_model
from test_gguf_model import EXPERTS, FLOAT32, GOLDENS, LLAMA, YARN, random_llama, tensors_of

from jaxserve.errors import CheckpointError
from jaxserve.loading.gguf import GGUFFile
from jaxserve.loading.weights import load_config, load_weights
from jaxserve.models import get_family


def test_all_problems_in_one_message_before_the_device_is_touched(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    tensors = random_llama()
    del tensors["model.layers.0.mlp.gate_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(64, np.float32)
    tensors["model.layers.0.self_attn.v_proj.weight"] = np.ones((64, 32), np.float32)
    tensors["model.layers.0.self_attn.o_proj.weight"] = np.ones((64, 64), np.int32)
    gguf_files.write_model(path, LLAMA, tensors)
    family = get_family(LLAMA)
    specs = family.param_specs(family.config(LLAMA))
    monkeypatch.setattr(jax, "device_put", None)
    mesh = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])
    with pytest.raises(CheckpointError) as error:
        load_weights(path, specs, dtype=FLOAT32, mesh=mesh)
    message = str(error.value)
    assert "missing: blk.0.ffn_gate.weight" in message
    assert "unexpected: blk.0.attn_q.bias" in message
    assert "blk.0.attn_v.weight is F32 [64, 32] and not [32, 64]" in message
    assert "blk.0.attn_output.weight is I32, known are F32, F16, BF16, Q4_0" in message
    assert message.count("blk.") == 4
    assert "\n" not in message


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type 'longrope' is not supported"),
        (YARN | {"llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier 0.1.* is not supported"),
        (YARN | {"llama.rope.scaling.yarn_attn_factor": 2.0}, "yarn_attn_factor 2.0 is not supported"),
        ({"llama.rope.scaling.type": "linear"}, "factor is missing"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "llama.rope.scaling.attn_factor 2.0 is not supported"),
        ({"llama.attention.causal": False}, "llama.attention.causal False is not supported"),
        ({"llama.expert_count": 8}, "llama.expert_used_count must be of type int"),
        (EXPERTS | {"llama.expert_gating_func": 2}, "llama.expert_gating_func 2 is not supported"),
        (EXPERTS, "missing: blk.0.ffn_down_exps.weight, .*unexpected: blk.0.ffn_down.weight"),
        ({"llama.attention.sliding_window": 8}, "llama.attention.sliding_window 8 is not supported"),
        ({"llama.attention.value_length": 8}, "keys and values of different lengths"),
        ({"llama.block_count": "one"}, "llama.block_count must be of type int, got 'one'"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count must be positive"),
        ({"llama.rope.dimension_count": 8}, "partial_rotary_factor other than 1 is not supported"),
    ],
)
def test_what_is_not_served_is_named(tmp_path, metadata, message):
    gguf_files.write_model(tmp_path / "m.gguf", LLAMA, random_llama(), metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("name", "metadata", "message"),
    [
        ("gpt_oss_clamped", {"expert_gating_func": 1}, "gpt-oss.expert_gating_func 1 is not supported"),
        ("gpt_oss_clamped", {"rope.freq_base_swa": 5.0}, "gpt-oss.rope.freq_base_swa 5.0 is not supported"),
        ("starcoder2_tied_window", {"rope.freq_base_swa": 5.0}, "starcoder2.rope.freq_base_swa 5.0 is not supported"),
        ("gpt_oss_clamped", {"rope.dimension_count_swa": 2}, "gpt-oss.rope.dimension_count_swa 2 is not supported"),
        ("gpt_oss_clamped", {"rope.freq_base": float("nan")}, "gpt-oss.rope.freq_base must be finite .* got nan"),
        ("gpt_oss_clamped", {"swiglu_clamp_exp": [7.0, 7.0]}, "gpt-oss.swiglu_clamp_exp .7.0, 7.0. is not supported"),
        (
            "gpt_oss_clamped",
            {"attention.sliding_window": 0},
            "gpt-oss.attention.sliding_window must be positive, got 0",
        ),
        ("gpt_oss_clamped", {"attention.sliding_window_pattern": [True]}, "for each of 2 layers"),
        ("gptj_untied", {"rope.freq_base": 5.0}, "gptj.rope.freq_base 5.0 is not supported"),
        ("gptj_untied", {"rope.scaling.type": "linear"}, "gptj.rope.scaling.type 'linear' is not supported"),
        ("gptj_untied", {"rope.dimension_count": 12}, "rotary_dim must be even and at most"),
        ("gpt_neox_parallel", {"attention.sliding_window": 4}, "gptneox.attention.sliding_window 4 is not supported"),
        ("granite_biases", {"rope.scaling.finetuned": False}, "granite.rope.scaling.finetuned False is not supported"),
        ("glm_biases", {"attention.sliding_window": 4}, "chatglm.attention.sliding_window 4 is not supported"),
        ("deepseek_v2_greedy", {"expert_gating_func": 3}, "deepseek2.expert_gating_func 3 is not supported"),
        ("deepseek_v2_greedy", {"expert_weights_norm": True}, "deepseek2.expert_weights_norm True is not supported"),
        ("deepseek_v2_greedy", {"expert_gating_func": 2}, "missing: blk.0.exp_probs_b.bias"),
        ("deepseek_v3_groups", {"nextn_predict_layers": 2}, "nextn_predict_layers must be at least 0 and less"),
        ("deepseek_v3_groups", {"attention.temperature_scale": 0.1}, "temperature_scale 0.1.* is not supported"),
        ("deepseek_v3_groups", {"expert_group_count": 4}, "6 experts cannot be in 4 groups"),
        ("deepseek_v3_groups", {"attention.key_length_mla": 8}, "qk_nope_head_dim must be an integer of at least 1"),
        ("deepseek_v3_groups", {"rope.scaling.yarn_attn_factor": 2.0}, "yarn_attn_factor 2.0 is not supported"),
        (
            "deepseek_v3_groups",
            {"attention.value_length_mla": 6},
            r"attn_v_b.weight is F32 .4, 7, 6. and not .4, 6, 6.",
        ),
    ],
)
def test_what_a_family_does_not_serve_is_named(tmp_path, name, metadata, message):
    fields = json.loads((GOLDENS / name / "config.json").read_text())
    keys = {f"{gguf_files.architecture_of(fields)}.{key}": value for key, value in metadata.items()}
    gguf_files.write_model(tmp_path / "m.gguf", fields, tensors_of(name), metadata=keys)
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, 0.5) for name in ("attention.scale", "embedding_scale", "logit_scale", "residual_scale")],
        ("expert_count", 4),
    ],
)
def test_what_granite_has_and_bamba_has_not_is_named(tmp_path, name, value):
    fields = json.loads((GOLDENS / "bamba_tied" / "config.json").read_text())
    keys = gguf_files.RECORDED["bamba_tied"] | {f"granitehybrid.{name}": value}
    gguf_files.write_model(tmp_path / "m.gguf", fields, tensors_of("bamba_tied"), metadata=keys)
    with pytest.raises(CheckpointError, match=f"granitehybrid.{name} {value} is not supported"):
        load_config(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("name", "value"), [("expert_weights_norm", False), ("expert_gating_func", 1), ("expert_group_count", 2)]
)
def test_what_all_hy3_have_is_required(tmp_path, name, value):
    fields = json.loads((GOLDENS / "hy_v3_biases" / "config.json").read_text())
    keys = gguf_files.RECORDED["hy_v3_biases"] | {f"hy_v3.{name}": value}
    gguf_files.write_model(tmp_path / "m.gguf", fields, tensors_of("hy_v3_biases"), metadata=keys)
    with pytest.raises(CheckpointError, match=f"hy_v3.{name} {value} is not supported"):
        load_config(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("attention.head_count_kv", [1], r"mimo2.attention.head_count_kv .1. must have the same number for all of 2"),
        ("attention.key_length_swa", 8, "mimo2.attention.key_length_swa 8 is not supported"),
        ("attention.sliding_window", 0, "mimo2.attention.sliding_window must be positive, got 0"),
        ("attention.sliding_window_pattern", 6, "mimo2.attention.sliding_window_pattern must be of type list, got 6"),
        ("attention.sliding_window_pattern", [1, 1], r"mimo2.attention.head_count_kv .1, 2. must have the same number"),
        ("attention.value_length", 13, "v_head_dim .13. is more than head_dim .12."),
        ("attention.value_length_swa", 8, "mimo2.attention.value_length_swa 8 is not supported"),
        ("expert_gating_func", 1, "mimo2.expert_gating_func 1 is not supported"),
        ("expert_shared_count", 1, "n_shared_experts"),
        ("expert_weights_norm", False, "mimo2.expert_weights_norm False is not supported"),
        ("rope.dimension_count_swa", 4, "mimo2.rope.dimension_count_swa 4 is not supported"),
        ("rope.scaling.factor", 2.0, "mimo2.rope.scaling .linear. is not supported"),
    ],
)
def test_what_mimo_does_not_serve_is_named(tmp_path, name, value, message):
    keys = gguf_files.RECORDED["mimo_v2_flash_windows"] | {f"mimo2.{name}": value}
    gguf_files.write_model(tmp_path / "m.gguf", {}, tensors_of("mimo_v2_flash_windows"), metadata=keys)
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("attention.temperature_length", 16, "mistral4.attention.temperature_length 16 is not supported"),
        ("attention.output_scale", 0.5, "mistral4.attention.output_scale 0.5 is not supported"),
        ("attention.sliding_window", 64, "mistral4.attention.sliding_window 64 is not supported"),
        ("attention.value_scale", 0.5, "mistral4.attention.value_scale 0.5 is not supported"),
        ("expert_gating_func", 2, "mistral4.expert_gating_func 2 is not supported"),
        ("rope.scaling.yarn_attn_factor", 2.0, "mistral4.rope.scaling.yarn_attn_factor 2.0 is not supported"),
    ],
)
def test_what_mistral_small_4_does_not_serve_is_named(tmp_path, name, value, message):
    fields = json.loads((GOLDENS / "mistral4_beyond_original" / "config.json").read_text())
    keys = gguf_files.RECORDED["mistral4_beyond_original"] | {f"mistral4.{name}": value}
    gguf_files.write_model(tmp_path / "m.gguf", fields, tensors_of("mistral4_beyond_original"), metadata=keys)
    with pytest.raises(CheckpointError, match=message):
        load_config(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("golden", "name", "size"),
    [
        ("mimo_v2_flash_windows", "blk.0.attn_sinks.weight", 4),  # of a layer without a window
        ("mistral4_beyond_original", "blk.1.exp_probs_b.bias", 6),
    ],
)
def test_tensors_that_some_models_do_not_have_are_named(tmp_path, golden, name, size):
    keys = dict(gguf_files.RECORDED[golden])
    converted = gguf_files.convert_recorded(keys, tensors_of(golden)) | {name: np.ones(size, np.float32)}
    gguf_files.write(tmp_path / "m.gguf", keys.pop("general.architecture"), keys, converted)
    with pytest.raises(CheckpointError, match=f"unexpected: {name}"):
        load_model(tmp_path / "m.gguf")


def test_unknown_architecture(tmp_path):
    for name in ("mamba", "opt"):  # llama.cpp has no OPT
        gguf_files.write(tmp_path / "m.gguf", name, {}, {"x": np.ones(3, np.float32)})
        known = (
            "afmoe, apertus, arcee, baichuan, bailingmoe, bailingmoe2, bloom, chatglm, cohere2, command-r, deepseek2"
        )
        with pytest.raises(CheckpointError, match=f"unknown architecture '{name}'; known are {known}"):
            load_config(tmp_path / "m.gguf")
    gguf_files.write(tmp_path / "m.gguf", "llama", {}, {"x": np.ones(3, np.float32)})
    with pytest.raises(CheckpointError, match=r"has no tensor token_embd\.weight"):
        load_config(tmp_path / "m.gguf")


def split(path, names, **damage):
    """Two files of one, with the tensors `names` in the second."""
    file = GGUFFile(path)
    keys = {name: value for name, value in file.metadata.items() if name != "general.architecture"}
    parts = [path.with_name(f"split-0000{number}-of-00002.gguf") for number in (1, 2)]
    for number, part in enumerate(parts):
        tensors = {name: x.read() for name, x in file.tensors.items() if (name in names) == bool(number)}
        own = keys if number == 0 else {}
        gguf_files.write(part, "llama", own | {"split.count": 2, "split.no": number} | damage, tensors)
    return parts


def test_split_files(tmp_path):
    gguf_files.write_model(tmp_path / "m.gguf", LLAMA, random_llama())
    parts = split(tmp_path / "m.gguf", ("blk.0.attn_q.weight", "output_norm.weight"))
    expected = load_model(tmp_path / "m.gguf")[0]
    for part in parts:
        jax.tree.map(np.testing.assert_array_equal, load_model(part)[0], expected)
    assert GGUFFile(parts[0]).paths == parts


def test_damaged_parts_in_one_message(tmp_path):
    gguf_files.write_model(tmp_path / "m.gguf", LLAMA, random_llama() | {"model.norm.weight": np.ones(3, np.float32)})
    first, second = split(tmp_path / "m.gguf", ("blk.0.attn_q.weight", "blk.0.attn_k.weight"))
    whole = second.read_bytes()
    for content, complaint in (
        (whole[:60], "cannot read .*split-00002-of-00002.gguf: it ends within its header"),
        (whole[:-64], r"cannot read .*split-00002-of-00002.gguf: it has \d+ of \d+ bytes: it is truncated"),
        (None, "cannot read .*split-00002-of-00002.gguf: .*No such file"),
    ):
        second.unlink()
        if content:
            second.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{complaint}.*; tensors wrong: output_norm.weight is F32") as error:
            load_model(first)
        assert "missing:" not in str(error.value)
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.gguf is not part 2 of 2"):
        load_model(first)
    with pytest.raises(CheckpointError, match=r"is one of 3 files, which must be called NAME-00001-of-00003\.gguf"):
        load_model(split(tmp_path / "m.gguf", (), **{"split.count": 3})[0])
