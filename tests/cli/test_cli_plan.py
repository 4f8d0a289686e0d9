"""`jaxserve plan`: what it prints, its exit codes and its errors."""

import json

import pytest

from jaxserve import cli


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--shape", "llama-3-8b", "--device", "h200"], 0, "KV cache  108.75 GiB: 55,680 blocks of 16 tokens"),
        (["--shape", "llama-3-70b", "--device", "l4"], 3, "fits    no: random weights of the shape llama-3-70b needs"),
        (["--shape", "llama-3-8b", "--device", "h200", "--target-tpot", "1"], 3, "the target is 1 ms"),
        (["--shape", "llama-3-8b", "--device", "h200", "--input-len", "9000"], 3, "the context has 8,192"),
        (["scribe-2m", "--device", "4090"], 0, "on an H200"),
    ],
)
def test_plan_on_the_command_line(platform, capsys, arguments, code, expected):
    assert cli.main(["plan", *arguments, "--compile", "none"]) == code
    assert expected in capsys.readouterr().out


def test_a_plan_as_json(platform, capsys):
    assert cli.main(["plan", "--shape", "llama-3-8b", "--device", "h100", "--compile", "none", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["fits"], plan["sizes"]["num_blocks"], plan["load"]["input_len"]) == (True, 27_744, 1024)
    assert plan["splits"][0]["speed"]["num_requests"] == 256


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--device", "h200"], "name a MODEL or a --shape"),
        (["scribe-2m", "--shape", "phi-4", "--device", "h200"], "name a MODEL or a --shape"),
        (["scribe-2m", "--device", "h300"], "device 'h300' is not known"),
        (["scribe-2m", "--device", "h200", "--input-len", "0"], "--input-len must be at least 1"),
        (["scribe-2m", "--device", "h200", "--target-tpot", "0"], "--target-tpot must be positive"),
        (["no-such-model", "--device", "h200"], "no model 'no-such-model'"),
    ],
)
def test_mistakes_are_one_line(platform, capsys, arguments, error):
    assert cli.main(["plan", *arguments, "--compile", "none"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert error in err
