import pytest

from jaxserve import LLM, generate
from jaxserve.config import DEFAULT_MODEL, EngineConfig
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.loading import builtin
from jaxserve.loading.builtin import BUILTIN_MODELS, resolve_model, resolve_names, resolve_tokenizer


@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_a_built_in_model_is_found_in_either_place(name, tmp_path, monkeypatch):
    monkeypatch.setattr(builtin, "_CHECKPOINT_ROOTS", (tmp_path / "package", tmp_path / "tree"))
    (tmp_path / "tree" / name).mkdir(parents=True)
    with pytest.raises(CheckpointError, match=f"{name} is not part of this installation"):
        resolve_model(name)
    (tmp_path / "tree" / name / "config.json").write_text("{}")
    assert resolve_model(name) == str(tmp_path / "tree" / name)


def test_the_default_is_built_in_and_documented(tmp_path, monkeypatch):
    monkeypatch.setattr(builtin, "_CHECKPOINT_ROOTS", (tmp_path,))
    (tmp_path / DEFAULT_MODEL).mkdir()
    (tmp_path / DEFAULT_MODEL / "config.json").write_text("{}")
    assert resolve_names(EngineConfig()).model == str(tmp_path / DEFAULT_MODEL)
    assert DEFAULT_MODEL in EngineConfig.__dataclass_fields__["model"].metadata["help"]


@pytest.mark.parametrize(
    "start", [lambda: resolve_model(""), lambda: LLM(""), lambda: LLM(model=""), lambda: generate("a", model="")]
)
def test_an_empty_name_is_no_model(start):
    with pytest.raises(ConfigError, match=r"^model must not be empty"):
        start()


def test_what_is_not_a_model_is_said_in_one_line(tmp_path):
    for file in ("weights.bin", "weights.onnx"):
        (tmp_path / file).write_text("")
    for name, message in [
        ("gpt-17", "no model 'gpt-17': there is no such directory or .gguf file"),
        (str(tmp_path / "nowhere"), "it is neither a built-in model"),
        (str(tmp_path), "holds no config.json"),
        (str(tmp_path / "weights.bin"), "is a file of pickled weights, which are not read: .*save_pretrained"),
        (str(tmp_path / "weights.onnx"), "is a file; a model is a .gguf file or a directory"),
    ]:
        with pytest.raises(CheckpointError, match=message) as caught:
            resolve_model(name)
        assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match=r"^tokenizer: no model 'gpt-17'"):
        resolve_tokenizer("gpt-17")


BROKEN_JSON = {
    "{": r"it is no JSON \(Expecting property name.* line 1 column 2",
    " \n": "it is empty",
    "[1]": r"must hold a JSON object, got \[1\]",
    "[" * 100_000: r"it is no JSON \(maximum recursion depth",
}


@pytest.mark.parametrize("content", BROKEN_JSON, ids=["cut", "empty", "list", "deep"])
def test_a_broken_config_is_named_before_a_tokenizer_is_looked_for(content, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(content)
    for start in (resolve_model, LLM):  # without a tokenizer
        with pytest.raises(CheckpointError, match=BROKEN_JSON[content]) as caught:
            start(str(tmp_path))
        assert str(caught.value).count(str(path)) == 1
        assert "tokenizer" not in str(caught.value)


@pytest.mark.parametrize("resolve", [resolve_model, resolve_tokenizer])
def test_a_path_that_cannot_be_looked_at_is_named(resolve):
    for name, reason in [("a" * 5000, "File name too long"), ("~nobody-of-this-name/model", "home directory")]:
        with pytest.raises(CheckpointError, match=f"cannot read {name}: .*{reason}"):
            resolve(name)
