"""The command: help, flags that become options, `jaxserve generate`, mistakes and interrupts."""

import argparse
import dataclasses
import io
import re
import signal
import sys
from typing import get_args

import pytest

from jaxserve import cli
from jaxserve.config import EngineConfig, ReasoningParser, ServerConfig, ToolCallParser
from jaxserve.errors import ConfigError, EngineDead, InvalidRequest
from jaxserve.flags import parse_size, value_of
from jaxserve.sampling_params import PARAMETERS, SamplingParams, StructuredOutputs


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_every_group_of_help_fits_a_screen(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    blocks = capsys.readouterr().out.split("\n\n")
    titles = [block.split(":\n")[0] for block in blocks if re.match(r"[a-z ]+:\n", block)]
    assert {"model", "cache", "scheduling", "execution"} <= set(titles)
    assert max(len(block.splitlines()) for block in blocks) <= 24
    assert max(len(line) for block in blocks for line in block.splitlines()) <= 80

    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help", "cache"])
    assert ended.value.code == 0
    (block,) = [block for block in blocks if block.startswith("cache:")]
    assert capsys.readouterr().out == block + "\n"


def test_the_help_of_parse_lists_all_syntaxes(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main(["parse", "--help"])
    text = capsys.readouterr().out
    assert {*get_args(ToolCallParser), *get_args(ReasoningParser)} <= set(re.findall(r"[\w-]+", text))
    assert max(map(len, text.splitlines())) <= 80


def test_help_of_an_unknown_group_names_the_groups(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--help", "nothing"])
    assert ended.value.code == 2
    assert (
        "there are: model, quantization, overrides, cache, scheduling, execution, compilation, server"
        in capsys.readouterr().err
    )


def test_every_field_of_the_configs_is_a_flag_of_serve(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = capsys.readouterr().out
    for field in dataclasses.fields(EngineConfig) + dataclasses.fields(ServerConfig):
        assert f"--{field.name.replace('_', '-')}" in text


def test_a_server_has_a_limit_of_requests_that_wait_and_a_program_none():
    assert cli._parser().parse_args(["serve"]).max_num_waiting == 4096
    assert not hasattr(cli._parser().parse_args(["generate"]), "max_num_waiting")


def test_flags_become_engine_options(llm):
    flags = "--model m --max-num-seqs 7 --no-enable-prefix-caching --kv-cache-memory 1.5GiB --no-overlap --seed 5"
    assert cli.main(["generate", "a b", *flags.split()]) == 0
    assert llm.options == {
        "model": "m",
        "max_num_seqs": 7,
        "enable_prefix_caching": False,
        "kv_cache_memory": 3 * 2**29,
        "overlap": False,
        "seed": 5,
        "warmup": "none",
    }
    assert llm.is_closed


def test_names_that_vllm_has_for_the_same_are_accepted(llm):
    assert cli.main(["generate", "a", "--kv-cache-memory-bytes", "512", "-tp", "2", "--no-async-scheduling"]) == 0
    assert llm.options == {"kv_cache_memory": 512, "tensor_parallel_size": 2, "overlap": False, "warmup": "none"}


def test_only_the_shapes_that_are_needed_are_compiled_unless_asked_for(llm, capsys):
    assert cli.main(["generate", "a"]) == 0
    assert llm.options == {"warmup": "none"}
    assert cli.main(["generate", "a", "--warmup", "full"]) == 0
    assert llm.options == {"warmup": "full"}
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help", "compilation"])
    assert "what is compiled before the first request is taken" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("2KiB", 2048), ("2k", 2048), ("1.5 MiB", 3 * 2**19), ("32MB", 2**25), ("4GiB", 2**32), ("7B", 7)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


def test_texts_mean_what_they_mean_as_flags():
    """Ray's command line passes texts."""
    texts = {
        "max_num_seqs": "8",
        "max_model_len": "2K",
        "gpu_memory_utilization": "0.5",
        "kv_cache_memory": "2MiB",
        "enable_prefix_caching": "false",
        "dtype": "half",
        "hf_overrides": '{"a": 1}',
    }
    config = EngineConfig(**{name: value_of(EngineConfig, name, text) for name, text in texts.items()})
    assert (config.max_num_seqs, config.max_model_len, config.gpu_memory_utilization) == (8, 2048, 0.5)
    assert (config.kv_cache_memory, config.enable_prefix_caching, config.dtype) == (2**21, False, "float16")
    assert config.hf_overrides == {"a": 1}
    assert ServerConfig(api_key=value_of(ServerConfig, "api_key", "a")).api_key == ("a",)
    for name in ("max_num_seqs", "gpu_memory_utilization", "kv_cache_memory", "enable_prefix_caching", "hf_overrides"):
        with pytest.raises(ConfigError, match=f"^{name}: "):
            value_of(EngineConfig, name, "x")


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.2.3MiB", "4 apples", "1e9"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        parse_size(text)


def test_every_sampling_parameter_has_a_row_and_those_with_a_group_a_flag():
    assert [*PARAMETERS] == [*SamplingParams.__struct_fields__]
    groups = cli._parser().command("generate").groups
    flags = {action.dest: group for group in ("sampling", "output") for action in groups[group]}
    assert flags == {name: parameter.group for name, parameter in PARAMETERS.items() if parameter.group}


def test_structured_outputs_are_json(llm, capsys):
    assert cli.main(["generate", "a", "--structured-outputs", '{"choice": ["b", "c"]}']) == 0
    ((_, params),) = llm.asked
    assert params.structured_outputs == StructuredOutputs(choice=["b", "c"])
    for text, complaint in {
        "x": "is not JSON",
        "[]": "is not a JSON object",
        '{"a": 1}': "no field 'a'",
        "{}": "takes one of",
    }.items():
        with pytest.raises(SystemExit):
            cli.main(["generate", "a", "--structured-outputs", text])
        assert complaint in capsys.readouterr().err


def test_sampling_flags(llm):
    flags = [
        *("--temperature", "0.5", "--max-tokens", "9", "--top-p", "0.9", "--top-k", "3", "--seed", "11", "--n", "2"),
        *("--stop", "x", "--stop", "-y", "--stop-token-ids", "4", "--ignore-eos", "--no-skip-special-tokens"),
        *("--logit-bias", '{"15": -100}', "--allowed-token-ids", "15", "--allowed-token-ids", "16"),
    ]
    flags[flags.index("-y") - 1 : flags.index("-y") + 1] = ["--stop=-y"]
    assert cli.main(["generate", "a", *flags]) == 0
    ((_, params),) = llm.asked
    assert params == SamplingParams(
        temperature=0.5,
        max_tokens=9,
        top_p=0.9,
        top_k=3,
        seed=11,
        n=2,
        stop=["x", "-y"],
        stop_token_ids=[4],
        ignore_eos=True,
        skip_special_tokens=False,
        logit_bias={15: -100.0},
        allowed_token_ids=[15, 16],
    )
    assert llm.options == {"seed": 11, "warmup": "none"}


def test_generate_prints_the_prompt_and_its_continuation(llm, capsys):
    assert cli.main(["generate", "one two three"]) == 0
    assert capsys.readouterr() == ("one two three three two one\n", "")
    ((prompt, params),) = llm.asked
    assert (prompt, params.max_tokens) == ("one two three", 256)


def test_the_models_own_defaults_come_before_those_of_the_command(llm, monkeypatch):
    llm.recommended = {"max_tokens": 99, "temperature": 0.5}
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi"))
    assert cli.main(["generate", "a", "--temperature", "0.1"]) == 0
    assert cli.main(["chat"]) == 0
    assert [params for _, params in llm.asked] == [
        SamplingParams(max_tokens=99, temperature=0.1),
        SamplingParams(max_tokens=99, temperature=0.5),
    ]


def test_a_refused_prompt_is_not_printed(llm, capsys):
    llm.refuses_with = InvalidRequest("too long")
    assert cli.main(["generate", "a"]) == 1
    assert capsys.readouterr() == ("", "jaxserve: error: too long\n")


@pytest.mark.parametrize("arguments", [["generate"], ["generate", "-"]])
def test_generate_reads_the_prompt_from_standard_input(llm, capsys, monkeypatch, arguments):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out == "from a pipe pipe a from\n"


def test_several_prompts_are_labelled(llm, capsys):
    assert cli.main(["generate", "a b", "c d", "--n", "2"]) == 0
    assert capsys.readouterr().out == (
        "==> prompt 1 of 2, 1 of 2 <==\na b b a\n\n==> prompt 1 of 2, 2 of 2 <==\na b b a\n\n"
        "==> prompt 2 of 2, 1 of 2 <==\nc d d c\n\n==> prompt 2 of 2, 2 of 2 <==\nc d d c\n\n"
    )


def test_a_prompt_that_fails_is_in_the_exit_code(llm):
    llm.finish_reason = "error"
    assert cli.main(["generate", "a", "b"]) == 1


def test_logprobs_follow_the_text(llm, capsys):
    assert cli.main(["generate", "a b", "--logprobs", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a b b a",
        "' b' -0.5000 #1  'other' -1.2500 #2",
        "' a' -0.5000 #1  'other' -1.2500 #2",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate a --temperature -1", "temperature must be in [0.0, 100.0], got -1.0"),
        ("generate a --block-size 3", "block_size must be a power of two up to 512, got 3"),
        ("serve --port 99999", "port must be in [0, 65535], got 99999"),
        ("generate a --model nowhere", "no model 'nowhere': there is no such directory or .gguf file"),
        ("serve nowhere --port 0", "no model 'nowhere': there is no such directory or .gguf file"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_1(capsys, arguments, message):
    assert cli.main(arguments.split()) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"jaxserve: error: {message}")
    assert err.count("\n") == 1


def test_debug_shows_the_traceback(llm):
    llm.fails_with = EngineDead("gone")
    assert cli.main(["generate", "a"]) == 1
    with pytest.raises(EngineDead):
        cli.main(["generate", "a", "--log-level", "debug"])


def test_interrupting_is_quiet_and_a_second_time_kills(llm, sigint, monkeypatch, capsys):
    monkeypatch.setattr(llm, "stream", lambda *_: signal.raise_signal(signal.SIGINT))
    assert cli.main(["generate", "a"]) == 130
    assert capsys.readouterr().err == ""
    assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_without_an_interrupt_its_handler_stays(llm, sigint, handler):
    signal.signal(signal.SIGINT, handler)
    assert cli.main(["generate", "a"]) == 0
    assert signal.getsignal(signal.SIGINT) == handler


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["generate", "a", "--max-num", "3"], ["serve", "a", "b"]])
def test_wrong_usage_is_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err
