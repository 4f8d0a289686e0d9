"""Options of `jaxserve serve`: vLLM's flags, names, the environment and files, completion by shells."""

import pathlib
import re
import shlex
import socket

import pytest

import jaxserve.llm
from jaxserve import cli, logs, options_page, vllm_flags, vllm_page
from jaxserve.arguments import arguments_of
from jaxserve.config import EngineConfig


@pytest.mark.parametrize(
    "flags",
    [
        "-O3 --enforce-eager --swap-space 4 --trust_remote_code --compilation-config.mode=3",
        "--enable-auto-tool-choice --load-format mistral -n 1 --uvicorn-log-level=info",
        "--disable-log-requests --stream-interval=20 --disable-custom-all-reduce",
        "--no-enable-log-requests --no-enable-lora --no-trust-remote-code --no-disable-log-stats --no-enforce-eager",
        "--limit-mm-per-prompt.image 2 --compilation_config.pass_config.x+ 1 -O.mode=3 -cc.x=1",
    ],
)
def test_flags_of_vllm_that_need_nothing_are_accepted_with_a_line_each(served, capsys, flags):
    assert cli.main(["serve", "scribe-2m", *flags.split()]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == sum(flag.startswith("-") for flag in flags.split())
    assert all(re.match(r"jaxserve: --?[^:]+: nothing is needed: ", line) for line in lines)
    assert pathlib.Path(served[0][0].model).name == "scribe-2m"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--enable-lora", "--enable-lora: instead: merge the adapter"),
        ("--kv-cache-dtype nvfp4", "--kv-cache-dtype: 'nvfp4' is not supported: keys and values are held as fp8"),
        ("--load-format pt", "--load-format: 'pt' is not supported: convert it to safetensors"),
        ("--tensr 2", "unknown flag --tensr, did you mean --tensor-parallel-size?"),
        ("--tensor-paralel-size 2", "unknown flag --tensor-paralel-size, did you mean --tensor-parallel-size?"),
        ("-q torchao", "argument --quantization/-q: invalid choice: 'torchao'"),
        (  # all reasons at once, those of values that are out of range, too
            "--enable-lora --nnodes 2 --max-loras 4 --max-num-seqs 1.5 --port 99999 --frob 3 --block-size 3 --headless",
            "error: --enable-lora, --max-loras: instead: merge the adapter into the model with peft before it is "
            "served; --nnodes: '2' is not supported; only 1 (one host is used); argument --max-num-seqs: '1.5' is "
            "not a whole number such as 4096, 8k (8000) or 8K (8192); --headless: not supported; unknown flag --frob; "
            "block_size must be a power of two up to 512, got 3; port must be in [0, 65535], got 99999\n",
        ),
        ("--max-num-seqs 1.5", "'1.5' is not a whole number such as 4096, 8k (8000) or 8K (8192)"),
        ("extra", "unexpected argument 'extra'"),
    ],
)
def test_other_flags_end_with_the_usage_of_the_command_and_what_to_do(served, capsys, flags, message):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "scribe-2m", *flags.split()])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("usage: jaxserve serve [MODEL]")
    assert message in err
    assert not served


PUBLISHED = pathlib.Path(__file__).with_name("published_commands.txt").read_text().splitlines()


@pytest.mark.parametrize("line", PUBLISHED)
def test_commands_of_model_cards_and_recipes_start_or_are_refused_with_all_reasons(served, capsys, monkeypatch, line):
    """Each line has the names of what is refused, or "starts", and the arguments of `vllm serve`."""
    monkeypatch.setattr("jaxserve.loading.builtin.resolve_names", lambda config: config)
    refused, command = line.split(" | ", 1)
    if refused == "starts":
        assert cli.main(["serve", *shlex.split(command)]) == 0
        assert len(served) == 1
    else:
        try:
            code = cli.main(["serve", *shlex.split(command)])
        except SystemExit as ended:
            code = ended.code
        assert code in (1, 2)
        assert not served
        error = capsys.readouterr().err.split("error: ")[-1]
        named = re.findall(
            r"(?:^|; |, )(?:argument |unknown flag )?(--?\w[\w-]+|\w+(?= must)|speculative_config)", error
        )
        assert sorted(named) == sorted(refused.split())


def test_no_row_of_the_table_of_vllms_flags_hides_a_flag_that_we_have():
    ours = {flag for flag in cli.flags_of_serve() if not flag.startswith("--no-")}
    assert not ours & (vllm_flags.FLAGS.keys() | vllm_flags.RENAMED.keys())
    assert ours >= {*vllm_flags.ONLY_OURS}
    assert {name.split(".")[0] for name in vllm_flags.RENAMED.values()} <= {*cli.flags_of_serve()}


def test_advice_for_keywords_names_keywords():
    for flag, row in vllm_flags.FLAGS.items():
        verdict = vllm_flags.said_of(flag.strip("-").replace("-", "_"), "odd", row)
        assert "--" not in verdict.text
    advice = "--max-num-seqs or --no-access-log, --kernels=xla; --kv-cache-memory N"
    assert vllm_flags.in_python(advice) == "max_num_seqs or access_log=False, kernels='xla'; kv_cache_memory N"


@pytest.mark.parametrize(("page", "name"), [(vllm_page, "vllm.md"), (options_page, "api.md")])
def test_pages_have_the_tables_as_they_are_printed(page, name):
    text = (pathlib.Path(jaxserve.__file__).parents[1] / "docs" / name).read_text()
    assert page.page() in text, f"run python -m {page.__name__}"


@pytest.mark.parametrize(("text", "number"), [("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("1M", 2**20), ("7", 7)])
def test_numbers_may_have_a_suffix(served, text, number):
    assert cli.main(["serve", "--max-num-seqs", text]) == 0
    assert served[0][0].max_num_seqs == number


@pytest.mark.parametrize(("word", "dtype"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_dtypes_have_pytorchs_names_too(served, word, dtype):
    assert cli.main(["serve", "--dtype", word]) == 0
    assert served[0][0].dtype == dtype
    assert EngineConfig(dtype=word).dtype == dtype


def test_a_model_may_have_several_names(served, capsys):
    assert cli.main(["serve", "scribe-2m", "--served-model-name", "a", "b"]) == 0
    assert served[0][1].served_model_name == ("a", "b")
    with pytest.raises(SystemExit):
        cli.main(["serve", "--served-model-name", "a", "scribe-2m"])
    assert "write MODEL first, or --model scribe-2m" in capsys.readouterr().err


def test_options_come_from_the_command_line_then_the_environment_then_a_file(served, tmp_path, monkeypatch, capsys):
    file = tmp_path / "serve.yaml"
    file.write_text("model: scribe-2m\nport: 1\nmax_num_seqs: 2\nserved-model-name: [a, b]\noverlap: false\nseed: 3\n")
    monkeypatch.setenv("JAXSERVE_PORT", "4")
    monkeypatch.setenv("JAXSERVE_SEED", "5")
    assert cli.main(["serve", "--config", str(file), "--seed", "6"]) == 0
    ((engine, server),) = served
    assert (engine.max_num_seqs, engine.overlap, engine.seed) == (2, False, 6)
    assert (server.port, server.served_model_name) == (4, ("a", "b"))
    assert pathlib.Path(engine.model).name == "scribe-2m"
    assert cli.main(["serve", "scribe-15m", "--config", str(file)]) == 0
    assert pathlib.Path(served[1][0].model).name == "scribe-15m"
    file.write_text("max-num-seq: 2\n")
    with pytest.raises(SystemExit):
        cli.main(["serve", "--config", str(file)])
    assert "unknown flag --max-num-seq, did you mean --max-num-seqs?" in capsys.readouterr().err
    file.write_bytes(b"seed: 1 # \xe9\n")  # not UTF-8
    with pytest.raises(SystemExit):
        cli.main(["serve", "--config", str(file)])
    assert f"cannot read {file}: 'utf-8' codec" in " ".join(capsys.readouterr().err.split())
    file.write_text("# max-num-seqs: 2\n")
    assert cli.main(["serve", "--config", str(file)]) == 0
    assert served[2][0].max_num_seqs is None


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("JAXSERVE_MAX_NUM_SEQ", "JAXSERVE_MAX_NUM_SEQS"),
        ("JAXSERVE_MAX_MODEL_LENGTH", "JAXSERVE_MAX_MODEL_LEN"),
        ("JAXSERVE_APIKEY", "JAXSERVE_API_KEY"),
        ("JAXSERVE_NO_OVERLAP", "JAXSERVE_OVERLAP"),  # true or false is its value
        ("JAXSERVE_API_SERVER_COUNT", "JAXSERVE_API_WORKERS"),  # another name of the flag
        ("JAXSERVE_SSL_CA_CERT", "JAXSERVE_SSL_CA_CERTS"),
        ("JAXSERVE_ZZZZZZZZ", None),
        ("JAXSERVE_CONFIG", None),  # a file is named on the command line only
    ],
)
@pytest.mark.parametrize("command", [["serve"], ["generate", "a", "--model", "/no/model"]], ids=lambda words: words[0])
def test_a_variable_that_sets_nothing_is_reported(served, monkeypatch, capfd, command, name, meant):
    monkeypatch.setenv(name, "1")
    cli.main(command)
    logs.flush()
    reported = capfd.readouterr().err
    question = "" if meant is None else f", did you mean {meant}?"
    assert f"the environment variable {name} sets no option{question}\n" in reported


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JAXSERVE_MAX_NUM_SEQS", "3"),
        ("JAXSERVE_TEMPERATURE", "0"),  # an option of another command
        ("JAXSERVE_TEST_DATA", "/tmp"),
        ("JAXSERVE_SWAP_SPACE", "4"),  # vLLM's, and harmless
        # What Kubernetes sets beside a Service named jaxserve.
        ("JAXSERVE_PORT", "tcp://10.0.0.1:80"),
        ("JAXSERVE_SERVICE_HOST", "10.0.0.1"),
        ("JAXSERVE_SERVICE_PORT_HTTP", "80"),
        ("JAXSERVE_PORT_80_TCP_ADDR", "10.0.0.1"),
    ],
)
def test_other_variables_are_not(served, monkeypatch, capfd, name, value):
    monkeypatch.setenv(name, value)
    assert cli.main(["serve"]) == 0
    logs.flush()
    assert "sets no option" not in capfd.readouterr().err
    ((_, server),) = served
    assert server.port == 8000


@pytest.mark.parametrize("text", ["auto", "-1"])
def test_the_context_may_be_what_memory_holds(served, text):
    assert cli.main(["serve", "--max-model-len", text]) == 0
    assert cli.main(["serve", f"--max-model-len={text}"]) == 0
    assert [engine.max_model_len for engine, _ in served] == ["auto", "auto"]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shells_complete_commands_and_flags(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "--max-num-seqs" in script
    assert "run-batch" in script


@pytest.mark.parametrize(
    ("flags", "overrides"),
    [
        (["--hf-overrides", '{"a": {"b": 1}, "c": 2}'], {"a": {"b": 1}, "c": 2}),
        (["--hf-overrides.a.b=1", "--hf_overrides.a.d", "x", "--hf-overrides.c"], {"a": {"b": 1, "d": "x"}, "c": True}),
        (["--hf-overrides.a+=1", "--hf-overrides.a+", "2"], {"a": [1, 2]}),
        (["--rope-scaling", '{"factor": 4}', "--rope-theta=1e6"], {"rope_scaling": {"factor": 4}, "rope_theta": 1e6}),
        (["--hf-overrides", '{"a": 1}', "--rope-theta", "7"], {"a": 1, "rope_theta": 7}),
    ],
)
def test_json_may_be_written_part_by_part(flags, overrides):
    args = cli._parser().parse_args(arguments_of(["serve", *flags]))
    assert args.hf_overrides == overrides


def test_what_follows_two_dashes_is_no_flag_nor_is_a_dotted_value():
    args = cli._parser().parse_args(arguments_of(["generate", "--max_tokens=3", "--", "--a_b", "-x.y"]))
    assert (args.max_tokens, args.prompts) == (3, ["--a_b", "-x.y"])
    assert arguments_of(["chat", "--system", "-a.b", "c"]) == ["chat", "--system", "-a.b", "c"]


def test_a_file_may_hold_what_vllm_reads(tmp_path, capsys):
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "enforce-eager: true\nno-enable-prefix-caching: true\nlimit-mm-per-prompt: {image: 1}\nenable_lora: false\n"
        "disable-uvicorn-access-log: true\nrope-theta: 7.0\nhf-overrides: {a: {b: null}}\nallowed-origins: ['*']\n"
        "trust-remote-code: false\n"
    )
    args = cli._parser().parse_args(["serve", "--config", str(file)])
    assert (args.enable_prefix_caching, args.access_log, args.allowed_origins) == (False, False, ["*"])
    assert args.hf_overrides == {"rope_theta": 7.0, "a": {"b": None}}
    assert len(capsys.readouterr().err.splitlines()) == 4


def test_lists_may_be_json(served):
    assert cli.main(["serve", "--allowed-origins", '["a", "b"]', "--allowed-origins", "c"]) == 0
    assert served[0][1].allowed_origins == ("a", "b", "c")


def test_a_port_in_use_is_said_before_a_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--port", str(port)]) == 1
    assert re.fullmatch(rf"jaxserve: error: cannot listen on 127.0.0.1:{port}: .+\n", capsys.readouterr().err)


def test_serve_passes_its_options_on(monkeypatch):
    served = []
    monkeypatch.setattr("jaxserve.server.process.supervisor.serve", lambda *configs: served.append(configs) or 0)
    assert cli.main(["serve", "scribe-2m", "--port", "0", "--seed", "7", "--api-workers", "2"]) == 0
    ((engine, server),) = served
    assert pathlib.Path(engine.model).name == "scribe-2m"
    assert pathlib.Path(engine.model).is_dir()
    assert (engine.seed, server.api_workers, server.served_model_name) == (7, 2, ("scribe-2m",))
