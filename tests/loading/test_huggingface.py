"""Reading Hugging Face directories: dtypes, shards, sharded devices, and one clear complaint about a wrong one."""

import json
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import GOLDENS
from safetensors.numpy import save_file

from jaxserve.config import EngineConfig
from jaxserve.convert import convert
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.layers.params import ParamSpec
from jaxserve.loading.builtin import resolve_names
from jaxserve.loading.huggingface import load_config, load_params, resolve_dtype
from jaxserve.overview import needs

LLAMA = next(path for path in GOLDENS if path.name == "llama_untied")

SPECS = {
    "up": ParamSpec(shape=(8, 4), axes=("ffn", "embed"), source=("up.weight",)),
    "pair": ParamSpec(shape=(2, 8), axes=(None, "ffn"), source=("a", "b"), source_shapes=((8,), (8,))),
    "norm": ParamSpec(shape=(4,), axes=(None,), source=("norm",), dtype=np.float32),
}
FLOAT32 = np.dtype(np.float32)


def make_tensors(dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = {"up.weight": (8, 4), "a": (8,), "b": (8,), "norm": (4,)}
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def make_mesh(size):
    return jax.make_mesh((size,), ("tensor",), devices=jax.devices()[:size])


def load(path, *, dtype=FLOAT32, devices=1, progress=False):
    return load_params(path, SPECS, dtype=dtype, mesh=make_mesh(devices), progress=progress)


@pytest.mark.parametrize("stored", [np.float32, np.float16, jnp.bfloat16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("served", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_every_dtype_into_every_dtype(tmp_path, stored, served):
    tensors = make_tensors(stored)
    save_file(tensors, tmp_path / "model.safetensors")
    params = load(tmp_path, dtype=np.dtype(served))
    assert params["up"].dtype == served
    np.testing.assert_array_equal(params["up"], tensors["up.weight"].astype(served))
    np.testing.assert_array_equal(params["pair"], np.stack([tensors["a"], tensors["b"]]).astype(served))
    assert params["norm"].dtype == np.float32


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize(("hidden", "inner"), [(4, 3), (4, 2), (3, 3)])
def test_experts_of_either_order_whatever_is_square(tmp_path, hidden, inner, is_turned):
    rng = np.random.default_rng(0)
    shapes = {"experts.gate_up_proj": (2, hidden, 2 * inner), "experts.down_proj": (2, inner, hidden)}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    stored = {name: np.ascontiguousarray(each.swapaxes(1, 2)) if is_turned else each for name, each in tensors.items()}
    save_file(stored, tmp_path / "model.safetensors")
    specs = {
        name: ParamSpec(
            shape=(shape[0], *shape[:0:-1]),
            axes=(None,) * 3,
            source=(name,),
            source_shapes=(shape,),
            is_transposed=True,
            expert_size=inner,
        )
        for name, shape in shapes.items()
    }
    params = load_params(tmp_path, specs, dtype=FLOAT32, mesh=make_mesh(1), progress=False)
    for name, each in tensors.items():
        np.testing.assert_array_equal(params[name], each.swapaxes(1, 2))


def test_memory_of_fused_and_cast_weights(tmp_path):
    parts = {name: np.ones((256, 1024), np.float32) for name in "abcd"}
    save_file(parts, tmp_path / "model.safetensors")
    spec = ParamSpec(shape=(1024, 1024), axes=(None, None), source=tuple(parts), source_shapes=((256, 1024),) * 4)
    tracemalloc.start()
    try:
        params = load_params(tmp_path, {"w": spec}, dtype=np.dtype(jnp.bfloat16), mesh=make_mesh(1), progress=False)
        assert tracemalloc.get_traced_memory()[1] < 3 * params["w"].nbytes + 2**20
    finally:
        tracemalloc.stop()


def save_shards(path, tensors):
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[:2], "model-2.safetensors": names[2:]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, path / file)
    weight_map = {name: file for file, members in shards.items() for name in members}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_several_files_onto_several_devices(tmp_path):
    tensors = make_tensors()
    save_shards(tmp_path, tensors)
    params = load(tmp_path, devices=4)
    np.testing.assert_array_equal(params["up"], tensors["up.weight"])
    np.testing.assert_array_equal(params["pair"], np.stack([tensors["a"], tensors["b"]]))
    assert {shard.data.shape for shard in params["up"].addressable_shards} == {(2, 4)}
    assert {shard.data.shape for shard in params["pair"].addressable_shards} == {(2, 2)}
    assert params["norm"].sharding.is_fully_replicated


def test_known_extras_are_ignored_and_others_are_not(tmp_path):
    extras = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
        "lm_head.weight": np.ones((8, 4), np.float32),
    }
    save_file(make_tensors() | extras, tmp_path / "model.safetensors")
    load(tmp_path)
    save_file(make_tensors() | {"up.bias": np.ones(8, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected: up\.bias"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["k_scale", "k_proj.k_scale", "attn.kv_scale", "q_scale"])
def test_static_scales_of_attention_are_left_out_with_a_line(tmp_path, caplog, name):
    extra = {f"model.layers.0.self_attn.{name}": np.ones(1, np.float32)}
    save_file(make_tensors() | extra, tmp_path / "model.safetensors")
    with caplog.at_level("INFO"):
        load(tmp_path)
    assert f"left out: 1 static scales of attention, such as model.layers.0.self_attn.{name}" in caplog.text


@pytest.mark.parametrize("name", ["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"])
def test_layers_that_predict_further_tokens_are_ignored(tmp_path, name):
    behind = {f"model.layers.{index}.eh_proj.weight": np.ones(4, np.float32) for index in (3, 4)}
    save_file(make_tensors() | behind, tmp_path / "model.safetensors")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_hidden_layers": 3, name: 2}))
    load(tmp_path)
    for further in ({name: 1}, {}):
        config.write_text(json.dumps({"num_hidden_layers": 3} | further))
        with pytest.raises(CheckpointError, match=r"unexpected: .*model\.layers\.4\.eh_proj\.weight"):
            load(tmp_path)


def test_keys_of_layers_that_read_those_of_others_are_ignored(tmp_path):
    """Published checkpoints of Gemma 3n and 4 have them."""
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 3, "num_kv_shared_layers": 1}')
    for layer, is_ignored in ((2, True), (1, False)):
        names = [f"model.layers.{layer}.self_attn.{part}.weight" for part in ("k_proj", "v_proj", "k_norm", "v_norm")]
        extra = dict.fromkeys(names, np.ones(4, np.float32))
        save_file(make_tensors() | extra, tmp_path / "model.safetensors")
        if is_ignored:
            load(tmp_path)
        else:
            with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.1\.self_attn\.k_norm"):
                load(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("mtp.layers.0.self_attn.q_proj.weight", "mtp.fc.weight", "model.mtp.norm.weight"),
        "model.mtp_block.0.mlp.up_proj.weight",
    ],
)
def test_tensors_that_predict_further_tokens_outside_the_layers(tmp_path, name):
    save_file(make_tensors() | {name: np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    load(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "jamba", "time_step_limit": [0.0, float("inf")]},
        {"model_type": "zamba2", "layer_types": "linear", "rope_scaling": []},
        {"model_type": "deepseek_v4", "quantization_config": {"quant_method": "fp4"}},
        {"model_type": "jamba", "num_labels": "two", "load_in_4bit": True},
        {"model_type": "qwen3_omni_moe", "text_config": {"quantization_config": {"quant_method": "fp8"}}},
    ],
)
def test_an_unknown_family_is_refused_as_such_whatever_else_its_config_says(tmp_path, changes):
    path = shutil.copytree(LLAMA, tmp_path / "model")
    fields = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(fields))
    refusal = f"model/config.json: unknown model_type '{changes['model_type']}'; `jaxserve models` lists the known ones"
    for read in (
        lambda: load_config(path),
        lambda: resolve_names(EngineConfig(model=str(path))),
        lambda: needs(EngineConfig(model=str(path)), memory=2**30),
        lambda: convert(str(path), tmp_path / "store", progress=False),
    ):
        with pytest.raises(CheckpointError) as failure:
            read()
        assert refusal in str(failure.value)


def test_checkpoint_of_the_model_without_its_head(tmp_path):
    specs = {
        "norm": ParamSpec(shape=(4,), axes=(None,), source=("model.norm.weight",)),
        "head": ParamSpec(shape=(8, 4), axes=("vocab", None), source=("lm_head.weight",)),
    }
    norm, head = np.arange(4, dtype=np.float32), np.ones((8, 4), np.float32)
    save_file({"norm.weight": norm, "lm_head.weight": head}, tmp_path / "model.safetensors")
    params = load_params(tmp_path, specs, dtype=FLOAT32, mesh=make_mesh(1), progress=False)
    np.testing.assert_array_equal(params["norm"], norm)
    np.testing.assert_array_equal(params["head"], head)
    save_file({"other.weight": norm, "lm_head.weight": head}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: model\.norm\.weight; unexpected: other\.weight"):
        load_params(tmp_path, specs, dtype=FLOAT32, mesh=make_mesh(1), progress=False)


def test_all_problems_in_one_message_before_the_device_is_touched(tmp_path, monkeypatch):
    tensors = make_tensors() | {"up.weight": np.ones((4, 8), np.float32), "a": np.ones(8, np.int32)}
    del tensors["b"], tensors["norm"]
    save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr(jax, "device_put", None)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    message = str(error.value)
    assert "missing: b, norm" in message
    assert "a is I32 [8]" in message
    assert "up.weight is F32 [4, 8] and not a float of [8, 4]" in message
    assert "\n" not in message


def test_weight_that_does_not_divide_over_the_mesh(tmp_path):
    save_file(make_tensors(), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"a: ffn of size 8 .* 3 devices"):
        load(tmp_path, devices=3)


def test_progress_bar_counts_bytes(tmp_path, capsys):
    save_file(make_tensors(), tmp_path / "model.safetensors")
    load(tmp_path, progress=True)
    shown = capsys.readouterr().err
    assert "loading weights: 100%" in shown
    assert "208/208" in shown
    load(tmp_path, progress=False)
    assert capsys.readouterr().err == ""


def test_truncated_and_absent_files(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor .* in "):
        load(tmp_path)
    save_shards(tmp_path, make_tensors())
    for index in (
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "../other.safetensors"}}',
    ):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(CheckpointError, match="no weight_map of tensors to files"):
            load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{")
    with pytest.raises(
        CheckpointError, match=r"cannot read model\.safetensors \(truncated or damaged: .*header"
    ) as error:
        load(tmp_path)
    assert "missing" not in str(error.value)


def test_damaged_shards_and_tensors_in_one_message_before_the_device_is_touched(tmp_path, monkeypatch):
    files = {"absent": ["up.weight"], "truncated": ["a"], "whole": ["b", "surprise"], "again": ["b"]}
    tensors = make_tensors() | {"surprise": np.ones(2, np.float32), "b": np.ones(9, np.float32)}
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, tmp_path / f"{file}.safetensors")
    weight_map = {name: f"{file}.safetensors" for file, names in files.items() for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"surprise": "whole.safetensors"} | weight_map})
    )
    (tmp_path / "absent.safetensors").unlink()
    whole = (tmp_path / "truncated.safetensors").read_bytes()
    (tmp_path / "truncated.safetensors").write_bytes(whole[:-4])
    monkeypatch.setattr(jax, "device_put", None)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    message = str(error.value)
    assert "cannot read absent.safetensors (no such file), truncated.safetensors (truncated or damaged: " in message
    assert "in several files: b;" in message
    assert "; tensors missing: norm; unexpected: surprise; wrong: b is F32 [9] and not a float of [8]" in message
    assert "\n" not in message


def test_pickles_are_refused(tmp_path):
    for name in ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"):
        (tmp_path / name).write_bytes(b"\x80\x02.")
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    message = str(error.value)
    assert "pickled weights only (pytorch_model-00001-of-00002.bin and 1 more)" in message
    assert "can run any code" in message
    assert f"AutoModelForCausalLM.from_pretrained('{tmp_path}').save_pretrained(" in message
    assert "\n" not in message
    save_file(make_tensors(), tmp_path / "model.safetensors")
    load(tmp_path)


def test_load_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"no model directory at .*absent"):
        load_config(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"no config\.json in "):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"quantization_config": null}')
    assert load_config(tmp_path) == {"quantization_config": None}
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "hqq"}}')
    with pytest.raises(CheckpointError, match=r"quantized checkpoints .* mxfp4: quant_method of .* is 'hqq'"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert load_config(str(tmp_path)) == {"model_type": "llama"}


@pytest.mark.parametrize(
    ("requested", "fields", "is_cpu", "expected"),
    [
        ("auto", {"dtype": "bfloat16"}, True, np.float32),
        ("auto", {"dtype": "float16"}, False, np.float16),
        ("auto", {"torch_dtype": "float32"}, False, np.float32),
        ("auto", {}, False, jnp.bfloat16),
        ("bfloat16", {"dtype": "float32"}, True, jnp.bfloat16),
    ],
)
def test_resolve_dtype(requested, fields, is_cpu, expected):
    assert resolve_dtype(requested, fields, is_cpu=is_cpu) == np.dtype(expected)


def test_dtype_that_is_not_served():
    with pytest.raises(CheckpointError, match="unknown dtype 'float64'; known are float32, bfloat16, float16"):
        resolve_dtype("auto", {"dtype": "float64"}, is_cpu=False)
    with pytest.raises(CheckpointError, match=r"unknown dtype \['float32'\]"):
        resolve_dtype("auto", {"dtype": ["float32"]}, is_cpu=False)
