"""What `jaxserve models` computes, against counting by hand."""

import json
import pathlib
import re

import pytest
from demand import counts
from golden_folder import GOLDENS

from jaxserve import overview
from jaxserve.config import EngineConfig
from jaxserve.convert import convert
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.gpus import find_gpu
from jaxserve.loading.multimodal import WRAPPERS
from jaxserve.models import FAMILIES, get_family
from jaxserve.planning.sizes import declare, sizes_of

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 100,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
PARAMETERS = 2 * 100 * 32 + 32 + 3 * (2 * 32 + 32 * 32 * 2 + 2 * 16 * 32 + 3 * 32 * 48)
KV_BYTES = 3 * 2 * 2 * 8 * 2  # layers, K and V, heads, their size, bfloat16


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def needs_of(model, *, memory=2**30, **options):
    return overview.needs(EngineConfig(model=model, **options), memory=memory)


def test_counts(model):
    needs = needs_of(model)
    assert needs.num_parameters == PARAMETERS
    assert needs.weight_bytes == {"float32": 4 * PARAMETERS, "bfloat16": 2 * PARAMETERS, "float16": 2 * PARAMETERS}
    assert (needs.dtype, needs.kv_bytes_per_token, needs.is_tied) == ("bfloat16", {None: KV_BYTES}, False)
    assert needs_of(model, dtype="float32").kv_bytes_per_token == {None: 2 * KV_BYTES}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama_untied", {}),
        ("llama_untied", {"kv_cache_dtype": "fp8"}),
        ("llama_untied", {"max_model_len": 64, "gpu_memory_utilization": 0.5}),
        ("gemma3_two_thetas", {}),  # windows
        ("qwen3_next_tied", {}),  # states
        ("qwen3_moe_normalised", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ],
)
def test_needs_are_the_sizes_of_a_plan(name, options):
    """The plan's own are compared with engines in tests/planning."""
    options |= {"dtype": "bfloat16"}
    needs = needs_of(str(GOLDENS / name), memory=find_gpu("h200").memory, **options)
    engine = declare(EngineConfig(model=str(GOLDENS / name), **options), find_gpu("h200"), to_compile=False)
    sizes = sizes_of(engine)
    found = needs.usable_memory, needs.held_bytes, needs.step_bytes, needs.max_batch, needs.context
    full = sizes.num_full_requests, sizes.max_model_len
    assert found == (sizes.usable_bytes, sizes.weight_bytes, sizes.step_bytes, *full)
    assert needs.num_devices * sum(needs.kv_bytes_per_token.values()) == sizes.kv_bytes_per_token


@pytest.mark.parametrize("devices", [2, 4])
def test_memory_of_each_device(model, devices):
    """Each has one KV head, of four devices two the same one."""
    needs = needs_of(model, tensor_parallel_size=devices)
    attention = (2 * 4 // devices + 2) * 8 * 32  # queries and outputs, keys and values
    share = 2 * 100 * 32 // devices + 32 + 3 * (2 * 32 + attention + 3 * 32 * 48 // devices)
    assert (needs.num_parameters, needs.num_devices) == (PARAMETERS, devices)
    assert needs.weight_bytes["bfloat16"] == 2 * share
    assert needs.kv_bytes_per_token == {None: KV_BYTES // 2}
    assert f"{devices}; bytes are of each" in overview.needs_text(model, needs, memory=2**30)


def test_memory_of_the_stage_that_needs_most(model):
    """The first one has two of three layers, and the last one no less of the vocabulary."""
    needs = needs_of(model, tensor_parallel_size=2, pipeline_parallel_size=2)
    attention = (2 * 4 // 2 + 2) * 8 * 32
    share = 100 * 32 // 2 + 2 * (2 * 32 + attention + 3 * 32 * 48 // 2)
    assert (needs.num_parameters, needs.num_devices) == (PARAMETERS, 4)
    assert needs.weight_bytes["bfloat16"] == 2 * (share + 32)
    assert needs.kv_bytes_per_token == {None: KV_BYTES // 2 * 2 // 3}
    assert needs.floors == needs_of(model, tensor_parallel_size=2).floors
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 4, but this model has 3 layers"):
        needs_of(model, pipeline_parallel_size=4)


@pytest.mark.parametrize(("devices", "message"), [(3, "over 3 devices .*tensor_parallel_size"), (0, "at least 1")])
def test_numbers_of_devices_that_do_not_do(model, devices, message):
    with pytest.raises(ConfigError, match=message):
        needs_of(model, tensor_parallel_size=devices)


def test_latents():
    (model,) = sorted(GOLDENS.glob("deepseek_v2*"))[:1]
    fields = json.loads((model / "config.json").read_text())
    found = needs_of(str(model), dtype="bfloat16")
    latent = fields["kv_lora_rank"] + fields["qk_rope_head_dim"]
    assert found.kv_bytes_per_token == {None: fields["num_hidden_layers"] * latent * 2}
    assert f"a latent of {latent}" in found.layers
    split = needs_of(str(model), dtype="bfloat16", tensor_parallel_size=3)
    assert split.kv_bytes_per_token == found.kv_bytes_per_token


@pytest.mark.slow
def test_gguf_files_and_stores(test_data, tmp_path):
    folder = test_data / "models" / "stories260K"
    convert(str(folder), tmp_path / "store", dtype="bfloat16", progress=False)
    expected = needs_of(str(folder), memory=2**20, dtype="bfloat16")
    assert needs_of(str(tmp_path / "store"), memory=2**20) == expected
    own_head = needs_of(str(folder / "stories260K-f32.gguf"), memory=2**20, dtype="bfloat16")  # repeats it
    assert own_head.num_parameters == expected.num_parameters + 512 * 64
    assert own_head.kv_bytes_per_token == expected.kv_bytes_per_token


@pytest.mark.parametrize("memory", [1, 2**29])
def test_what_does_not_fit(model, memory):
    needs = needs_of(model, memory=memory)
    assert needs.kv_memory < 0
    assert (needs.max_context, needs.max_batch) == (0, 0)
    assert "with the weights in" in overview.needs_text(model, needs, memory=memory)


def test_families_say_what_their_configs_can():
    rows = {row["model_type"]: row for row in overview.families()}
    assert rows["gpt2"]["KV heads"] == "one a query head"
    assert rows["deepseek_v2"]["KV heads"] == "latent"
    assert rows["gemma3_text"]["positions"] == "rotary, local rotary"
    assert rows["gemma2"]["windows"] == "by layer"
    assert {name for name, row in rows.items() if row["positions"] == "learned"} == {"gpt2", "opt"}
    assert {name for name, row in rows.items() if "ALiBi" in row["positions"]} == {"bloom", "falcon"}
    assert all(all(row.values()) for row in rows.values() if not row["serves"].startswith("text only"))


def test_a_dtype_that_is_not_served_is_told_with_the_path(model):
    pathlib.Path(model, "config.json").write_text(json.dumps(LLAMA | {"dtype": "int8"}))
    with pytest.raises(CheckpointError, match=f"^{model}/config.json: unknown dtype 'int8'"):
        needs_of(model)


def test_the_text_says_what_it_assumes(model):
    text = overview.needs_text(model, needs_of(model), memory=2**30)
    assert "with 1.00 GiB (--memory; default: an H200's), in bfloat16 (--dtype; default: the checkpoint's)" in text
    windows = str(GOLDENS / "gemma3_two_thetas")
    text = overview.needs_text(windows, needs_of(windows), memory=2**30)
    assert "256 more in a window of 7, rounded up to blocks of 16 tokens in float32" in text


def test_the_table_promises_only_what_loads():
    rows = overview.families()
    assert [row["model_type"] for row in rows] == [*FAMILIES, *WRAPPERS]
    assert {wrapper.family for wrapper in WRAPPERS.values()} <= FAMILIES.keys()
    assert "Jamba" not in overview.families_text()
    with pytest.raises(CheckpointError, match="unknown model_type 'jamba'"):
        get_family({"model_type": "jamba"})


def test_pages_promise_no_more_than_is_served():
    root = pathlib.Path(__file__).parents[1]
    assert f"| Models | {len(FAMILIES)} families" in (root / "README.md").read_text()
    page = (root / "docs" / "models.md").read_text()
    for (served, total), text in zip(counts(), (r"(\d+) of (\d+) are served", r"(\d+) of (\d+) \(\d+%\)"), strict=True):
        said = re.search(text, page)
        assert int(said[1]) <= served, "python tests/support/demand.py"
        assert int(said[2]) == total, "python tests/support/demand.py"


def test_no_such_model():
    with pytest.raises(CheckpointError, match="no model 'nowhere'"):
        needs_of("nowhere", memory=1)
