"""`jaxserve models` and `jaxserve convert`: what they print, and their errors."""

import json
import pathlib
import re
import shutil

import pytest

import jaxserve.llm
from jaxserve import cli
from jaxserve.loading.multimodal import WRAPPERS
from jaxserve.models import FAMILIES

BUILTIN = pathlib.Path(jaxserve.__file__).parents[1] / "checkpoints" / "scribe-2m"


def test_models_prints_a_row_for_each_family(platform, capsys):
    assert cli.main(["models"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "model_type"
    assert {row.split()[0] for row in rows} == FAMILIES.keys() | WRAPPERS.keys()
    with pytest.raises(SystemExit):
        cli.main(["models", "--memory", "1GiB"])
    assert "which MODEL?" in capsys.readouterr().err


@pytest.mark.slow
def test_models_says_what_a_model_needs(platform, capsys, test_data):
    model = str(test_data / "models/stories260K")
    assert cli.main(["models", model, "--memory", "1GiB", "--dtype", "bfloat16"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"parameters +260,032\n", shown)
    assert re.search(r"weights +0\.99 MiB in float32, 0\.50 MiB in bfloat16, 0\.50 MiB in float16\n", shown)
    assert re.search(r"KV +640 bytes a token in bfloat16\n", shown)
    assert re.search(r"alone +a request of 512 tokens\n", shown)
    assert re.search(r"at once +1,\d\d\d requests of 512 tokens\n", shown)  # most of 410 MiB / (512 * 640 bytes)
    assert cli.main(["models", model, "--dtype", "bfloat16", "-tp", "2"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"devices +2; bytes are of each\n", shown)
    assert re.search(r"KV +320 bytes a token in bfloat16\n", shown)
    assert cli.main(["models", model, "--memory", "256KiB"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"fits +no: of 0\.2\d MiB .* with the weights in float32 that is \d.* too much\n", shown)


@pytest.mark.parametrize(
    ("flags", "free", "expected"),
    [
        ("", 2**30, [" CPU cores, no GPU: .* plain XLA, in float32", r"1\.00 GiB .*: 341 requests of 1,024 tokens"]),
        (
            "-tp 2 --kv-cache-dtype int8",
            2**30,
            ["the GPU is not used: ", "weights +9.38 MiB of 2.00 GiB", r": 1,285 requests of 1,024 tokens"],
        ),
        ("", 2**20, ["the model cannot be served here: .* but 0.0 GiB are free"]),
    ],
)
def test_models_begins_with_this_machine(platform, monkeypatch, capsys, flags, free, expected):
    monkeypatch.setattr("jaxserve.planning.here._has_gpu", lambda: bool(flags))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr("jaxserve.planning.here.free_memory", lambda _: free)
    assert cli.main(["models", "scribe-2m", *flags.split()]) == 0
    shown = capsys.readouterr().out
    assert re.match(r"model .*\nthis machine  ", shown)
    assert all(re.search(text, shown) for text in expected), shown


def test_convert_and_its_mistakes(platform, capsys, test_data, tmp_path):
    model, store = str(test_data / "models/stories260K"), str(tmp_path / "store")
    assert cli.main(["convert", model, store, "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == f"{store}: 32 arrays in bfloat16, from stories260K\n"
    assert cli.main(["convert", model, store]) == 1
    assert capsys.readouterr().err == f"jaxserve: error: {store} exists already: --force replaces it\n"
    assert cli.main(["convert", model, store, "--force"]) == 0
    assert cli.main(["models", store, "--memory", "1GiB"]) == 0


def test_a_model_that_does_not_fit_is_one_line(test_data, tmp_path, capsys):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(test_data / "models/stories260K" / name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 10**12}))
    assert cli.main(["generate", "a", "--model", str(tmp_path), "--load-format", "dummy"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"jaxserve: error: .+ needs \d+\.\d GiB .+ but .+ GiB are free\n", err)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "gpt1"}, "unknown model_type 'gpt1'; `jaxserve models` lists the known ones"),
        ({"model_type": None}, "there is no model_type; `jaxserve models` lists the known ones"),
        ({"hidden_size": 0}, "hidden_size must be an integer of at least 1, got 0"),
    ],
)
@pytest.mark.parametrize("command", ["generate a --model MODEL", "models MODEL", "convert MODEL STORE"])
def test_errors_in_a_config_are_reported_with_its_path(command, changes, complaint, platform, tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    shutil.copyfile(BUILTIN / "tokenizer.json", model / "tokenizer.json")
    shutil.copyfile(BUILTIN / "tokenizer_config.json", model / "tokenizer_config.json")
    fields = json.loads((BUILTIN / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    command = command.replace("MODEL", str(model)).replace("STORE", str(tmp_path / "store"))
    assert cli.main(command.split()) == 1
    assert capsys.readouterr().err.endswith(f"jaxserve: error: {model / 'config.json'}: {complaint}\n")
