"""Stores: what `convert` writes, every mesh and dtype reads, and a damaged store is reported in one message."""

import hashlib
import json
import pathlib
import resource
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from quantized_models import specs_of
from safetensors.numpy import save_file

from jaxserve.convert import convert
from jaxserve.errors import CheckpointError
from jaxserve.layers.params import ParamSpec
from jaxserve.loading import orbax_store
from jaxserve.loading.huggingface import load_config, load_params
from jaxserve.loading.orbax_store import load_store, write_store
from jaxserve.loading.store_manifest import MANIFEST, Source, is_store, read_manifest
from jaxserve.loading.weights import load_weights, open_weights
from jaxserve.tokenizer import Tokenizer


def make_mesh(size):
    return jax.make_mesh((size,), ("tensor",), devices=jax.devices()[:size])


def assert_equal(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.fixture(scope="module")
def stories(test_data):
    return test_data / "models" / "stories260K"


@pytest.fixture(scope="module")
def store(stories, tmp_path_factory):
    path = tmp_path_factory.mktemp("stores") / "stories"
    convert(str(stories), path, progress=False)
    return path


@pytest.fixture
def damaged(store, tmp_path):
    """Copy the store, to damage the copy."""
    return shutil.copytree(store, tmp_path / "damaged")


@pytest.mark.parametrize(("devices", "dtype"), [(1, jnp.float32), (4, jnp.float32), (2, jnp.bfloat16)])
def test_a_store_is_read_onto_any_mesh_in_any_dtype(stories, store, devices, dtype):
    mesh, dtype = make_mesh(devices), np.dtype(dtype)
    expected = load_params(stories, specs_of(stories), dtype=dtype, mesh=mesh, progress=False)
    got = load_weights(store, specs_of(store), dtype=dtype, mesh=mesh)
    assert_equal(got, expected)
    same = jax.tree.map(lambda a, b: (a.dtype, a.sharding) == (b.dtype, b.sharding), got, expected)
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_stored_in_the_dtype_that_is_asked_for(stories, tmp_path, dtype):
    path = tmp_path / "narrow"
    assert convert(str(stories), path, dtype=dtype, progress=False).dtype == dtype
    assert load_config(path)["dtype"] == dtype
    size = sum(file.stat().st_size for file in (path / "weights").rglob("*") if file.parent.name.startswith("layers"))
    assert size < 0.7 * (stories / "model.safetensors").stat().st_size
    expected = load_params(stories, specs_of(stories), dtype=np.dtype(dtype), mesh=make_mesh(1), progress=False)
    assert_equal(load_store(path, specs_of(path), dtype=np.dtype(dtype), mesh=make_mesh(1)), expected)
    wider = load_store(path, specs_of(path), dtype=np.dtype("float32"), mesh=make_mesh(1))
    assert_equal(wider, jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float32), expected))


def test_a_store_is_a_whole_model_directory_that_says_what_it_was_made_of(stories, store):
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (store / name).read_bytes() == (stories / name).read_bytes()
    assert not list(store.glob("*.safetensors"))
    assert not list(store.glob("*.gguf"))
    assert not list(store.parent.glob(".*"))  # the directory in which it was written
    manifest = read_manifest(store)
    assert manifest.source.name == "stories260K"
    assert len(manifest.source.sha256["model.safetensors"]) == 64
    assert (manifest.model_type, manifest.dtype) == ("llama", "float32")
    assert manifest.versions.keys() == {"jaxserve", "jax", "orbax-checkpoint"}
    assert manifest.config == load_config(store)
    assert manifest.arrays["layers.4.attention.qkv.values"].shape == (4, 4, 8, 64)


def test_a_gguf_file_becomes_a_store(stories, tmp_path):
    path = stories / "stories260K-f32.gguf"
    manifest = convert(str(path), tmp_path / "store", progress=False)
    assert manifest.source.name == path.name
    assert manifest.source.sha256 == {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}
    specs = specs_of(tmp_path / "store")
    expected = load_weights(path, specs, dtype=np.dtype("float32"), mesh=make_mesh(1), progress=False)
    got = load_weights(tmp_path / "store", specs, dtype=np.dtype("float32"), mesh=make_mesh(1), progress=False)
    assert_equal(got, expected)
    written, original = Tokenizer.load(tmp_path / "store"), Tokenizer.load(path)
    assert written.eos_token_ids == original.eos_token_ids
    for text in ("Once upon a time", "  Lily's dog\n ünï 漢 <s></s>", ""):
        assert written.encode(text) == original.encode(text)
        assert written.decode(written.encode(text)) == original.decode(original.encode(text))


def test_memory_of_a_conversion(tmp_path):
    largest, num_weights = 2**22, 8
    tensors = {f"w{index}.{part}": np.ones((512, 1024), np.float32) for index in range(num_weights) for part in "ab"}
    (tmp_path / "source").mkdir()
    save_file(tensors, tmp_path / "source/model.safetensors")
    specs = {
        f"w{index}": ParamSpec(
            shape=(1024, 1024),
            axes=(None, None),
            source=(f"w{index}.a", f"w{index}.b"),
            source_shapes=((512, 1024),) * 2,
            num_inputs=1,
            rows=np.arange(1024)[::-1],
        )
        for index in range(num_weights)
    }
    options = {"dtype": np.dtype("float32"), "config": {"model_type": "llama"}, "copied": {}, "progress": False}
    tracemalloc.start()
    try:
        with open_weights(tmp_path / "source", specs) as weights:
            write_store(tmp_path / "store", weights, source=Source(name="source", sha256={}), **options)
        assert tracemalloc.get_traced_memory()[1] < 3 * largest + 2**20
    finally:
        tracemalloc.stop()
    assert (tmp_path / "store/weights/w7.values/0.0").stat().st_size == largest


def test_a_disk_that_is_full_at_the_very_end_leaves_no_store(tmp_path):
    """The last 100 bytes of the largest file do not fit: no file may have more than the others need."""
    rows = 3 * 4096 + 100
    (tmp_path / "source").mkdir()
    save_file({"w": np.ones((rows, 1), np.float32)}, tmp_path / "source/model.safetensors")
    specs = {"w": ParamSpec(shape=(rows, 1), axes=(None, None), source=("w",))}
    options = {"dtype": np.dtype("float32"), "config": {"model_type": "llama"}, "copied": {}, "progress": False}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * rows - 100, limits[1]))
    try:
        with open_weights(tmp_path / "source", specs) as weights, pytest.raises(CheckpointError, match="cannot write"):
            write_store(tmp_path / "store", weights, source=Source(name="source", sha256={}), **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_orbax_itself_reads_a_store(store):
    expected = load_store(store, specs_of(store), dtype=np.dtype("float32"), mesh=make_mesh(1), progress=False)
    target = ocp.checkpoint_utils.construct_restore_args(expected)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        restored = checkpointer.restore(
            store / "weights", args=ocp.args.PyTreeRestore(item=expected, restore_args=target)
        )
    assert_equal(restored, expected)


def test_loaded_weights_do_not_stay_in_the_file(damaged):
    params = load_store(damaged, specs_of(damaged), dtype=np.dtype("float32"), mesh=make_mesh(1))
    before = np.array(params["embed"].values)
    with (damaged / "weights/embed.values/0.0").open("r+b") as file:
        file.write(bytes(before.nbytes))
    np.testing.assert_array_equal(params["embed"].values, before)


def test_everything_that_is_wrong_in_one_message_before_the_device_is_touched(damaged, monkeypatch):
    monkeypatch.setattr(jax, "device_put", None)
    manifest = json.loads((damaged / MANIFEST).read_text())
    del manifest["arrays"]["embed.values"]
    manifest["arrays"]["more"] = {"shape": [3], "dtype": "float32"}
    manifest["arrays"]["norm"]["shape"] = [65]
    (damaged / MANIFEST).write_text(json.dumps(manifest))
    config = load_config(damaged) | {"rope_theta": 5.0, "eos_token_id": 3}
    (damaged / "config.json").write_text(json.dumps(config))
    shutil.rmtree(damaged / "weights/layers.0.mlp.down.values")
    file = damaged / "weights/layers.1.mlp.down.values/0.0"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as error:
        load_store(damaged, specs_of(damaged), dtype=np.dtype("float32"), mesh=make_mesh(1))
    message = str(error.value)
    assert "; changed since in config.json: rope_theta;" in message
    assert "missing weights: embed.values; unexpected weights: more; wrong weights: norm is float32 [65] and" in message
    assert "missing files: layers.0.mlp.down.values/.zarray, layers.0.mlp.down.values/0.0" in message
    assert f"layers.1.mlp.down.values/0.0 has {file.stat().st_size} bytes and not {file.stat().st_size + 1}" in message
    assert "\n" not in message


def test_arrays_that_are_not_stored_plainly(damaged):
    for name, change in {"norm": {"compressor": {"id": "zstd"}}, "embed.values": {"chunks": [8, 64]}}.items():
        file = damaged / f"weights/{name}/.zarray"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    (damaged / "weights/layers.0.mlp_norm/.zarray").write_text("[]")
    with pytest.raises(CheckpointError) as error:
        load_store(damaged, specs_of(damaged), dtype=np.dtype("float32"), mesh=make_mesh(1))
    assert "not stored as one plain array: embed.values, layers.0.mlp_norm, norm" in str(error.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "cannot read .*jaxserve_manifest.json"),
        ("[]", "cannot read .*jaxserve_manifest.json"),
        ('{"format_version": 2}', "missing required field"),
        ('{"format_version": 1}', "format_version is 1, this jaxserve reads 2"),
    ],
)
def test_unreadable_manifests(damaged, text, complaint):
    (damaged / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=complaint):
        load_weights(damaged, {}, dtype=np.dtype("float32"), mesh=make_mesh(1))


def test_what_is_there_is_replaced_only_when_told_to_and_if_it_is_a_store(stories, store, damaged, tmp_path):
    with pytest.raises(CheckpointError, match="exists already: --force"):
        convert(str(stories), damaged, progress=False)
    (damaged / "weights/norm/.zarray").unlink()
    convert(str(stories), damaged, force=True, progress=False)
    load_store(damaged, specs_of(damaged), dtype=np.dtype("float32"), mesh=make_mesh(1))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/diary.txt").write_text("dear diary")
    with pytest.raises(CheckpointError, match="is no store of jaxserve"):
        convert(str(stories), tmp_path / "mine", force=True, progress=False)
    with pytest.raises(CheckpointError, match="is a store already"):
        convert(str(store), tmp_path / "again", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "mine"]


def test_a_store_that_cannot_be_replaced_stays(stories, damaged, monkeypatch):
    rename = pathlib.Path.rename

    def fail_for_the_new_one(path, target):
        if path.name == "new" and pathlib.Path(target) == damaged:
            raise OSError("no such luck")
        return rename(path, target)

    before = {path.relative_to(damaged): path.read_bytes() for path in damaged.rglob("*") if path.is_file()}
    monkeypatch.setattr(pathlib.Path, "rename", fail_for_the_new_one)
    with pytest.raises(CheckpointError, match="no such luck"):
        convert(str(stories), damaged, force=True, progress=False)
    assert {path.relative_to(damaged): path.read_bytes() for path in damaged.rglob("*") if path.is_file()} == before
    assert not list(damaged.parent.glob(".*"))


def test_a_conversion_that_fails_leaves_nothing(stories, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(orbax_store, "_write_weights", fail)
    with pytest.raises(CheckpointError, match=r"cannot write .*store: no space left"):
        convert(str(stories), tmp_path / "store", progress=False)
    assert not list(tmp_path.iterdir())
    assert not is_store(tmp_path / "store")
