"""Models of the hub, from a local server that speaks its protocol: what is downloaded, cached, resumed, refused."""

import errno
import json
import pathlib
import shutil

import numpy as np
import pytest
from fake_hub import Repo, running_hub
from safetensors.numpy import save

from jaxserve.cli import main
from jaxserve.config import EngineConfig
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.loading import hub
from jaxserve.loading.builtin import resolve_model, resolve_names, resolve_tokenizer
from jaxserve.loading.hub import HubName, parse_name

OLD, NEW = "a" * 40, "b" * 40
CONFIG = json.dumps({"model_type": "llama"}).encode()
SHARDS = {f"model-{index}.safetensors": save({f"x{index}": np.full(1000, index, np.float32)}) for index in (1, 2)}
INDEX = json.dumps({"weight_map": {"x1": "model-1.safetensors", "x2": "model-2.safetensors"}}).encode()
FILES = {
    "README.md": b"# a model",
    "config.json": CONFIG,
    "tokenizer.json": b"{}",
    "model.safetensors.index.json": INDEX,
    **SHARDS,
    "consolidated.safetensors": b"the same again",
    "pytorch_model.bin": b"\x80",
    "original/config.json": b"{}",
    "original/model-1.safetensors": b"the same again",
}
SMALL = ["config.json", "model.safetensors.index.json", "tokenizer.json"]


@pytest.fixture
def cache(tmp_path):
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def server(monkeypatch, cache, tmp_path):
    monkeypatch.chdir(tmp_path)
    with running_hub(monkeypatch, cache) as server:
        server.repos["org/sharded"] = Repo({OLD: {**FILES, "config.json": b"{}"}, NEW: FILES}, {"main": NEW, "v1": OLD})
        yield server


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in pathlib.Path(folder).rglob("*") if path.is_file())


def test_names():
    assert parse_name("org/name") == HubName("org/name")
    assert parse_name("org/na-me.1@refs/pr/3") == HubName("org/na-me.1", revision="refs/pr/3")
    assert parse_name("org/name/Q4/m.gguf@v1") == HubName("org/name", "Q4/m.gguf", "v1")
    assert str(parse_name("org/name/m.gguf@v1")) == "org/name/m.gguf@v1"
    for path in (
        *("name", "./org/name", "/org/name", "~/org/name", "../name", "org/name/", "a/b/c", "org/name@", "", "a//b"),
    ):
        assert parse_name(path) is None


def test_only_what_serving_reads_and_only_once(server):
    folder = resolve_model("org/sharded")
    assert names(folder) == sorted([*SMALL, *SHARDS])
    assert pathlib.Path(folder).name == NEW
    assert server.downloads() == [(name, "") for name in names(folder)]
    for name, content in SHARDS.items():
        assert (pathlib.Path(folder) / name).read_bytes() == content
    server.requests.clear()
    assert resolve_model("org/sharded") == folder
    assert server.downloads() == []


def test_modules_of_sentence_transformers_and_templates_for_pairs(server):
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    wanted = {
        "modules.json": json.dumps(modules).encode(),
        "sentence_bert_config.json": b"{}",
        "config_sentence_transformers.json": b"{}",
        "1_Pooling/config.json": b"{}",
        "2_Dense/config.json": b"{}",
        "2_Dense/model.safetensors": b"x",
        "additional_chat_templates/reranker.jinja": b"x",
    }
    surplus = {"2_Dense/pytorch_model.bin": b"x", "onnx/model.safetensors": b"x"}
    server.repos["org/embedder"] = Repo({NEW: FILES | wanted | surplus}, {"main": NEW})
    assert names(resolve_model("org/embedder")) == sorted([*SMALL, *SHARDS, *wanted])


def test_attention_to_later_tokens_is_named_before_weights_are_downloaded(server):
    config = json.dumps({"model_type": "qwen2", "is_causal": False}).encode()
    server.repos["org/both"] = Repo({NEW: FILES | {"config.json": config}}, {"main": NEW})
    with pytest.raises(CheckpointError, match="is_causal False is not supported"):
        resolve_model("org/both", progress=False)
    assert not any("model-1.safetensors" in str(request) for request in server.requests)


def test_revisions(server):
    assert pathlib.Path(resolve_model("org/sharded", revision="v1")).name == OLD
    assert pathlib.Path(resolve_model("org/sharded@v1")).name == OLD
    assert pathlib.Path(resolve_model(f"org/sharded@{OLD}", revision=OLD)).name == OLD
    with pytest.raises(CheckpointError, match="org/sharded has no revision 'v2'"):
        resolve_model("org/sharded@v2")
    with pytest.raises(ConfigError, match="revision is 'v1', but the model is org/sharded@main"):
        resolve_model("org/sharded@main", revision="v1")
    with pytest.raises(ConfigError, match="only models of the hub have one, and scribe-2m is none"):
        resolve_model("scribe-2m", revision="v1")


def test_a_path_comes_before_the_hub(server, tmp_path):
    (tmp_path / "org/sharded").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        resolve_model("org/sharded")
    (tmp_path / "org/sharded/config.json").write_bytes(CONFIG)
    assert resolve_model("org/sharded") == "org/sharded"
    assert not server.requests


def test_a_broken_connection_goes_on_where_it_was(server, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 512)
    server.cuts["model-2.safetensors"] = [1500]
    folder = resolve_model("org/sharded")
    assert (pathlib.Path(folder) / "model-2.safetensors").read_bytes() == SHARDS["model-2.safetensors"]
    assert ("model-2.safetensors", "bytes=1024-") in server.downloads()


def test_an_ended_download_keeps_its_complete_files(server, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)  # between trials
    server.cuts["model-2.safetensors"] = [10] + [0] * 20
    with pytest.raises(CheckpointError, match=r"cannot download org/sharded.*from http"):
        resolve_model("org/sharded")
    server.cuts.clear()
    server.requests.clear()
    resolve_model("org/sharded")
    assert server.downloads() == [("model-2.safetensors", "")]


def test_offline(server, monkeypatch):
    folder = resolve_model("org/sharded")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve_model("org/sharded") == folder
    assert resolve_model(f"org/sharded@{NEW}") == folder
    with pytest.raises(CheckpointError, match=r"path org/other, and no whole model .*; HF_HUB_OFFLINE"):
        resolve_model("org/other")
    (pathlib.Path(folder) / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"path org/sharded, and no whole model .*; HF_HUB_OFFLINE"):
        resolve_model("org/sharded")


def test_without_a_network(server, monkeypatch):
    folder = resolve_model("org/sharded")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert resolve_model("org/sharded") == folder
    with pytest.raises(CheckpointError, match=r"path org/other, .*; \S+:9/org/other cannot be reached: "):
        resolve_model("org/other")


def test_tokens_and_gates(server, monkeypatch):
    server.repos["org/private"] = Repo({NEW: FILES}, {"main": NEW}, token="secret")
    server.repos["org/gated"] = Repo({NEW: FILES}, {"main": NEW}, token="secret", is_gated=True)
    with pytest.raises(CheckpointError, match=r"no model 'org/private': .* or is private and HF_TOKEN is not set"):
        resolve_model("org/private")
    with pytest.raises(
        CheckpointError, match=r"org/gated is gated: ask for access at http.*/org/gated, and set HF_TOKEN"
    ):
        resolve_model("org/gated")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert names(resolve_model("org/private")) == names(resolve_model("org/gated"))


def test_no_room(server, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    with pytest.raises(CheckpointError, match=r"org/sharded needs 0\.0 GiB more in .*: HF_HOME names another"):
        resolve_model("org/sharded")
    assert {name for name, _ in server.downloads()} == set(SMALL)
    monkeypatch.undo()

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"no space left in .*: HF_HOME names another place"):
        hub.download(HubName("org/sharded"))


def test_repositories_without_safetensors(server):
    server.repos["org/pickled"] = Repo({NEW: {"config.json": CONFIG, "pytorch_model.bin": b"\x80"}}, {"main": NEW})
    with pytest.raises(
        CheckpointError,
        match=r"no safetensors, but pickled weights \(pytorch_model.bin\), which .*from_pretrained\('org/pickled'\)",
    ):
        resolve_model("org/pickled")
    split = {f"q4/m-0000{index}-of-00002.gguf": bytes([index]) for index in (1, 2)}
    server.repos["org/gguf"] = Repo({NEW: {"m-Q4.gguf": b"GGUF", "m-Q8.gguf": b"GGUF", **split}}, {"main": NEW})
    for name in ("org/gguf", "org/gguf/m-Q5.gguf"):
        with pytest.raises(CheckpointError, match=r"but GGUF files: name one of them, such as org/gguf/m-Q4\.gguf"):
            resolve_model(name)
    path = resolve_model("org/gguf/m-Q8.gguf")
    assert names(pathlib.Path(path).parent) == ["m-Q8.gguf"]
    path = resolve_model("org/gguf/q4/m-00001-of-00002.gguf")
    assert names(pathlib.Path(path).parent) == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]


@pytest.mark.parametrize("index", [b"{", b"[]", b"{}", b'{"weight_map": {"x": 3}}'])
def test_an_index_that_nobody_can_read_is_left_to_loading(server, index):
    files = {"config.json": CONFIG, "model.safetensors.index.json": index, "model.safetensors": b"whole"}
    server.repos["org/odd"] = Repo({NEW: files}, {"main": NEW})
    assert {"config.json", "model.safetensors.index.json"} <= set(names(resolve_model("org/odd")))


def test_a_broken_config_is_named_before_weights_are_downloaded(server):
    server.repos["org/broken"] = Repo({NEW: FILES | {"config.json": b"{"}}, {"main": NEW})
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json: it is no JSON"):
        resolve_model("org/broken")
    assert any("config.json" in str(request) for request in server.requests)
    assert not any("model-1.safetensors" in str(request) for request in server.requests)


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantization_map.json", "adapter_config.json"])
def test_what_is_not_served_is_named_before_weights_are_downloaded(server, name):
    server.repos["org/quantized"] = Repo({NEW: FILES | {name: b"{}"}}, {"main": NEW})
    with pytest.raises(CheckpointError, match=name):
        resolve_model("org/quantized", progress=False)
    assert not any("model-1.safetensors" in str(request) for request in server.requests)


def test_no_weights_where_none_are_read(server):
    assert names(resolve_tokenizer("org/sharded")) == SMALL
    assert names(resolve_names(EngineConfig(model="org/sharded", load_format="dummy")).model) == SMALL
    server.requests.clear()
    with pytest.raises(
        CheckpointError, match=r"the cache does not hold all of org/sharded: model-1\.safetensors, model-2"
    ):
        resolve_model("org/sharded", is_offline=True)
    assert not server.requests
    config = resolve_names(EngineConfig(model="org/sharded", revision="main", tokenizer="org/sharded@v1"))
    assert (config.revision, pathlib.Path(config.tokenizer).name) == (None, OLD)
    with pytest.raises(CheckpointError, match="path org/unknown, and no whole model"):
        resolve_tokenizer("org/unknown", is_offline=True)


@pytest.mark.slow
def test_on_the_command_line(server, test_data, capsys):
    folder = test_data / "models" / "stories260K"
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".gguf"}
    server.repos["karpathy/stories"] = Repo({NEW: files}, {"main": NEW})
    assert main(["models", "karpathy/stories", "--revision", "main"]) == 0
    assert "260,032" in capsys.readouterr().out
    assert ("model.safetensors", "") not in server.downloads()
    assert main(["convert", "karpathy/stories", "store"]) == 0
    assert f"from karpathy/stories@{NEW}" in capsys.readouterr().out
    assert main(["serve", "karpathy/nothing"]) == 1
    refusal = capsys.readouterr().err
    assert refusal.startswith("jaxserve: error: no model 'karpathy/nothing': there is no such path")
    assert refusal.count("\n") == 1
