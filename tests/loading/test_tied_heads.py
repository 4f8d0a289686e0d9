"""The LM head that a checkpoint has is used, whatever its config says about ties to the embedding."""

import json
import pathlib
import shutil

import gguf_files
import jax
import numpy as np
import pytest
from depths import quick_first
from golden_models import GOLDENS, full_logits, load_golden, load_model, relative_error
from safetensors.numpy import load_file, save_file

from jaxserve.config import EngineConfig
from jaxserve.convert import convert
from jaxserve.errors import CheckpointError
from jaxserve.loading.weights import load_config
from jaxserve.overview import needs


def is_tied(path):
    fields = json.loads((path / "config.json").read_text())
    return fields["tie_word_embeddings"] and (path / "model.safetensors").is_file()


TIED = list({load_config(path)["model_type"]: path for path in filter(is_tied, GOLDENS)}.values())
"""One golden of each family that has any."""
HEAD_OF = {"gpt_neox": "embed_out.weight"}


def names_of(path, tensors):
    """(embedding, LM head) of a golden's tensors."""
    ends = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", ".embeddings.weight")
    fields = json.loads((path / "config.json").read_text())
    (embedding,) = (name for name in tensors if name.endswith(ends))
    return embedding, HEAD_OF.get(fields["model_type"], "lm_head.weight")


ABSENT = object()


def rewrite(path, folder, change, **fields):
    """Return a copy of a golden in which `change` has changed the tensors, and `fields` those of its config."""
    copy = shutil.copytree(path, folder / path.name)
    tensors = load_file(path / "model.safetensors")
    save_file(change(dict(tensors)), copy / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text()) | fields
    (copy / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not ABSENT})
    )
    return copy


def other_head(path, tensors):
    embedding, head = names_of(path, tensors)
    noise = np.random.default_rng(5).normal(size=tensors[embedding].shape)
    return tensors | {head: noise.astype(tensors[embedding].dtype)}


def load(path):
    params, config, _, _ = load_model(path)
    return config, params


def test_there_are_tied_goldens():
    assert len(TIED) >= 15


@pytest.mark.slow
@pytest.mark.parametrize("path", quick_first(TIED[::3]), ids=lambda path: path.name)
def test_a_head_that_differs_is_used(tmp_path, path):
    changed = rewrite(path, tmp_path, lambda tensors: other_head(path, tensors))
    config, params = load(changed)
    _, head = names_of(path, load_file(path / "model.safetensors"))
    assert not config.tie_word_embeddings
    stored = load_file(changed / "model.safetensors")[head]
    np.testing.assert_array_equal(params["lm_head"].array(), stored.astype(np.float32))
    assert not needs(EngineConfig(model=str(changed)), memory=2**30).is_tied
    before, after = full_logits(load_golden(path)), full_logits(load_golden(changed))
    assert relative_error(after, before) > 0.01
    says_nothing = rewrite(path, tmp_path / "2", lambda tensors: other_head(path, tensors), tie_word_embeddings=ABSENT)
    assert not load(says_nothing)[0].tie_word_embeddings


def test_a_head_beside_an_embedding_of_codes_is_not_tied(tmp_path):
    path = next(path for path in TIED if path.name.startswith("llama_"))

    def pack(tensors):
        embedding, head = names_of(path, tensors)
        return {f"{embedding}_packed" if name == embedding else name: each for name, each in tensors.items()} | {
            head: tensors[embedding]
        }

    assert not load_config(rewrite(path, tmp_path, pack))["tie_word_embeddings"]


@pytest.mark.parametrize("path", quick_first(TIED, 4), ids=lambda path: path.name)
def test_a_head_that_equals_the_embedding_is_tied(tmp_path, path):
    def repeat(tensors, *, dtype=None):
        embedding, head = names_of(path, tensors)
        return tensors | {head: tensors[embedding].astype(dtype or tensors[embedding].dtype)}

    for number, dtype in enumerate([None, np.float32]):
        config, params = load(rewrite(path, tmp_path / str(number), lambda tensors, d=dtype: repeat(tensors, dtype=d)))
        assert config.tie_word_embeddings
        assert "lm_head" not in params


@pytest.mark.parametrize("path", quick_first(TIED[::3]), ids=lambda path: path.name)
def test_a_head_in_place_of_the_embedding_is_both(tmp_path, path):
    def rename(tensors):
        embedding, head = names_of(path, tensors)
        return {head if name == embedding else name: tensor for name, tensor in tensors.items()}

    changed = rewrite(path, tmp_path, rename)
    np.testing.assert_array_equal(full_logits(load_golden(changed)), full_logits(load_golden(path)))


def test_a_head_that_the_config_promises_must_be_there(tmp_path):
    path = next(path for path in TIED if path.name.startswith("llama_"))
    changed = rewrite(path, tmp_path, dict, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"tensors missing: lm_head\.weight"):
        load(changed)


@pytest.mark.parametrize("name", ["llama_tied_llama3_rope", "gpt2_tied"])
def test_stores_keep_what_the_files_had(tmp_path, name):
    path = next(path for path in TIED if path.name == name)
    changed = rewrite(path, tmp_path, lambda tensors: other_head(path, tensors))
    manifest = convert(str(changed), tmp_path / "store", dtype="float32", progress=False)
    assert manifest.config["tie_word_embeddings"] is False
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "store")[1], load(changed)[1])
    convert(str(path), tmp_path / "tied", dtype="float32", progress=False)
    assert "lm_head" not in load(tmp_path / "tied")[1]


def test_what_a_store_holds_decides(tmp_path):
    path = next(path for path in TIED if path.name.startswith("llama_"))
    changed = rewrite(path, tmp_path, lambda tensors: other_head(path, tensors))
    convert(str(changed), tmp_path / "store", progress=False)
    for name, field in (("config.json", None), ("jaxserve_manifest.json", "config")):
        file = tmp_path / "store" / name
        content = json.loads(file.read_text())
        (content if field is None else content[field])["tie_word_embeddings"] = True
        file.write_text(json.dumps(content))
    assert "lm_head" in load(tmp_path / "store")[1]


@pytest.mark.parametrize("is_own", [False, True])
def test_gguf_files(tmp_path, is_own):
    path = next(path for path in TIED if path.name.startswith("llama_"))
    tensors = load_file(path / "model.safetensors")
    tensors = other_head(path, tensors) if is_own else tensors
    fields = json.loads((path / "config.json").read_text())
    file = pathlib.Path(tmp_path / "m.gguf")
    gguf_files.write_model(file, fields, {name: np.asarray(t, np.float32) for name, t in tensors.items()})
    config, params = load(file)
    assert config.tie_word_embeddings is not is_own
    assert ("lm_head" in params) is is_own
