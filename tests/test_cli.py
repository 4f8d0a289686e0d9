import argparse
import io
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys

import openai
import pytest
from waiting import PATIENCE

import jaxserve.llm
from jaxserve import cli, vllm_flags, vllm_page
from jaxserve.config import EngineConfig
from jaxserve.errors import EngineDead, InvalidRequest
from jaxserve.flags import parse_size
from jaxserve.models import FAMILIES
from jaxserve.request import CompletionOutput, Logprob, RequestOutput, SamplingParams

BUILTIN = pathlib.Path(jaxserve.__file__).parents[1] / "checkpoints" / "scribe-2m"


class FakeLLM:
    """Answers every prompt with its words in reverse, one word at a time; records the requests."""

    def __init__(self):
        self.options = None
        self.asked = []
        self.is_closed = False
        self.fails_with = None
        self.refuses_with = None
        self.finish_reason = "length"
        self.recommended = {}

    def __call__(self, **options):
        self.options = options
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.is_closed = True

    def sampling_params(self, given, *, fallback):
        return SamplingParams(**(fallback | self.recommended | given))

    def _outputs(self, prompt, params):
        words = [f" {word}" for word in reversed(prompt.split())]
        logprobs = [{0: Logprob(-0.5, 1, word), 7: Logprob(-1.25, 2, "other")} for word in words]
        return words, logprobs if params.logprobs is not None else None

    def generate(self, prompts, params):
        self.asked.append((prompts, params))
        results = []
        for prompt in prompts:
            words, logprobs = self._outputs(prompt, params)
            outputs = [
                CompletionOutput(
                    index=index,
                    text="".join(words),
                    token_ids=[0] * len(words),
                    logprobs=logprobs,
                    finish_reason=self.finish_reason,
                )
                for index in range(params.n)
            ]
            results.append(RequestOutput(request_id="r", prompt=prompt, prompt_token_ids=[], outputs=outputs))
        return results

    def stream(self, prompt, params):
        self.asked.append((prompt, params))
        if self.refuses_with is not None:
            raise self.refuses_with
        return self._stream(prompt, params)

    def _stream(self, prompt, params):
        words, logprobs = self._outputs(prompt, params)
        for number, word in enumerate(words):
            if self.fails_with is not None:
                raise self.fails_with
            entry = None if logprobs is None else [logprobs[number]]
            output = CompletionOutput(index=0, text=word, token_ids=[0], logprobs=entry)
            yield RequestOutput(request_id="r", prompt=None, prompt_token_ids=[], outputs=[output])

    def stream_chat(self, messages, params):
        self.messages = [dict(message) for message in messages]
        return self.stream(messages[-1]["content"], params)


@pytest.fixture
def llm(monkeypatch):
    fake = FakeLLM()
    monkeypatch.setattr(jaxserve.llm, "LLM", fake)
    return fake


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

    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help", "cache"])
    assert ended.value.code == 0
    (block,) = [block for block in blocks if block.startswith("cache:")]
    assert capsys.readouterr().out == block + "\n"


def test_help_of_an_unknown_group_names_the_groups(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--help", "nothing"])
    assert ended.value.code == 2
    assert (
        "there are: model, quantization, cache, scheduling, execution, compilation, server" in capsys.readouterr().err
    )


def test_every_field_of_the_configs_is_a_flag_of_serve(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = capsys.readouterr().out
    for name in cli._ENGINE_FIELDS + cli._SERVER_FIELDS:
        assert f"--{name.replace('_', '-')}" in text


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


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.2.3MiB", "4 apples", "1e9"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        parse_size(text)


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


@pytest.fixture
def served(monkeypatch):
    """The configs that `jaxserve serve` would start with."""
    found = []
    monkeypatch.setattr("jaxserve.server.process.supervisor.serve", lambda *configs: found.append(configs) or 0)
    return found


@pytest.mark.parametrize(
    "flags",
    [
        "-O3 --enforce-eager --swap-space 4 --trust_remote_code --compilation-config.mode=3",
        "--enable-auto-tool-choice --kv-cache-dtype auto -pp 1",
        "--disable-log-requests --stream-interval=1",
    ],
)
def test_flags_of_vllm_that_need_nothing_are_accepted_with_a_line_each(served, capsys, flags):
    assert cli.main(["serve", "scribe-2m", *flags.split()]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == sum(flag.startswith("-") for flag in flags.split())
    assert all(re.match(r"jaxserve: --?\S+: nothing is needed: ", line) for line in lines)
    assert pathlib.Path(served[0][0].model).name == "scribe-2m"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--speculative-config {}", "--speculative-config: not supported"),
        ("--enable-lora", "--enable-lora: instead: merge the adapter"),
        ("--kv-cache-dtype fp8", "--kv-cache-dtype: 'fp8' is not supported; only auto, bfloat16"),
        ("--tensor-paralel-size 2", "unknown flag --tensor-paralel-size, did you mean --tensor-parallel-size?"),
        ("--quantization awq", "'awq': leave the flag out"),
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


def test_no_row_of_the_table_of_vllms_flags_hides_a_flag_that_we_have():
    ours = {flag for flag in cli.flags_of_serve() if not flag.startswith("--no-")}
    assert not ours & (vllm_flags.FLAGS.keys() | vllm_flags.RENAMED.keys())
    assert {name for name in vllm_flags.RENAMED.values() if name not in cli.flags_of_serve()} == set()


def test_the_page_of_vllms_flags_is_printed_from_the_table():
    page = (pathlib.Path(jaxserve.__file__).parents[1] / "docs/vllm.md").read_text()
    assert vllm_page.page() in page, "run python -m jaxserve.vllm_page"


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


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shells_complete_commands_and_flags(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "--max-num-seqs" in script
    assert "run-batch" in script


def test_chat_keeps_the_history(llm, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello there\n\nsecond turn\n/exit\nnever read\n"))
    assert cli.main(["chat", "--system", "be brief", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == " there hello\n turn second\n"
    assert llm.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": " there hello"},
        {"role": "user", "content": "second turn"},
    ]
    assert llm.asked[0][1] == SamplingParams(max_tokens=None, temperature=0.0)


def test_chat_obeys_commands(llm, capsys, monkeypatch):
    lines = ["/system be kind", "one", "/reset", "/system", "two", "/nonsense", "/help", "/quit", "never read"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    assert cli.main(["chat", "m"]) == 0
    assert llm.options["model"] == "m"
    assert llm.messages == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "two"}]
    out, err = capsys.readouterr()
    assert out.startswith(" one\nbe kind\n two\n/help")
    assert err == "There is no command /nonsense; /help lists them.\n"


def test_interrupting_a_chat_ends_the_answer_only(llm, monkeypatch, capsys, tmp_path, sigint):
    """Three Ctrl-C: in two answers, and at the prompt."""
    lines = iter(["one two", "three four", KeyboardInterrupt, "five"])

    def read(_prompt):
        line = next(lines, EOFError)
        if isinstance(line, str):
            return line
        raise line

    def stream(prompt, params):
        for delta in FakeLLM._stream(llm, prompt, params):
            yield delta
            if "five" not in prompt:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(llm, "_stream", stream)
    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert cli.main(["chat"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [" two [stopped]", " four [stopped]", "", " five", ""]
    assert [message["content"] for message in llm.messages] == ["one two", " two", "three four", " four", "five"]


def test_chat_ends_with_its_input(llm, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi"))
    assert cli.main(["chat"]) == 0
    assert capsys.readouterr().out == " hi\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate a --temperature -1", "temperature must be in [0.0, 100.0], got -1.0"),
        ("generate a --block-size 3", "block_size must be a power of two up to 512, got 3"),
        ("serve --port 99999", "port must be in [0, 65535], got 99999"),
        ("generate a --model nowhere", "no model 'nowhere': it is no .gguf file"),
        ("serve nowhere --port 0", "no model 'nowhere': it is no .gguf file"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_1(capsys, arguments, message):
    assert cli.main(arguments.split()) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"jaxserve: error: {message}")
    assert err.count("\n") == 1


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


def test_debug_shows_the_traceback(llm):
    llm.fails_with = EngineDead("gone")
    assert cli.main(["generate", "a"]) == 1
    with pytest.raises(EngineDead):
        cli.main(["generate", "a", "--log-level", "debug"])


@pytest.fixture
def sigint():
    """Handle SIGINT as a new process does; this process goes on after `main`."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


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


@pytest.mark.parametrize(
    "command", [[pathlib.Path(sys.executable).with_name("jaxserve")], [sys.executable, "-m", "jaxserve"]]
)
def test_the_command_is_installed_and_knows_its_version(command):
    result = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"jaxserve {jaxserve.__version__}\n"


def _command(*arguments: str) -> dict:
    """Return arguments of subprocess that run the command in a process of its own, with one CPU device as users have
    it.
    """
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    # Tests that run in the background ignore SIGINT, and so would the command.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "import sys; from jaxserve.__main__ import main; sys.exit(main())"
    return {"args": [sys.executable, "-W", "error", "-c", code, *arguments], "env": environment, "text": True}


@pytest.mark.slow
def test_stories_continue_as_published(test_data):
    golden = (test_data / "models/stories260K/GOLDEN.md").read_text()
    published = golden.split("-t 0.0\n")[1].split("\n```")[0]
    model = str(test_data / "models/stories260K")
    command = _command("generate", "Once upon a time", "--model", model, "--temperature", "0", "--max-tokens", "150")
    result = subprocess.run(**command, capture_output=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    text = result.stdout.removesuffix("\n")
    assert published.startswith(text)
    assert len(text) > 350


@pytest.mark.slow
def test_serve_answers_and_ends_on_a_signal(test_data):
    model = str(test_data / "models/stories260K")
    command = _command("serve", model, "--port", "0", "--warmup", "none", "--served-model-name", "stories")
    with subprocess.Popen(**command, stderr=subprocess.PIPE) as server:
        try:
            log = []
            for line in server.stderr:
                log.append(line)
                if found := re.search(r"serving stories at (http://\S+)", line):
                    break
            else:
                pytest.fail("the server did not start:\n" + "".join(log))
            client = openai.OpenAI(base_url=found[1], api_key="none", max_retries=0, timeout=PATIENCE)
            completion = client.completions.create(
                model="stories", prompt="Once upon a time", max_tokens=8, temperature=0
            )
            assert completion.choices[0].text == ", there was a little girl"
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=PATIENCE) == 0
        finally:
            server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["serve", "--port", "0"], ["generate", "a", "--warmup", "full"]], ids=" ".join)
def test_interrupting_a_warm_up_is_quiet(arguments, tmp_path):
    """A terminal sends the signal to every process of the group."""
    command = _command(*arguments, "--model", str(BUILTIN), "--compilation-cache-dir", str(tmp_path))
    command |= {"text": False, "bufsize": 0, "start_new_session": True}
    with subprocess.Popen(**command, stderr=subprocess.PIPE) as process:
        try:
            log = b""
            while b"compiling steps" not in log:
                read = process.stderr.read(4096)
                assert read, log
                log += read
            os.killpg(process.pid, signal.SIGINT)
            log += process.communicate(timeout=PATIENCE)[1]
            assert process.returncode == 130, log
            assert b"Traceback" not in log
        finally:
            process.kill()


@pytest.fixture
def platform(monkeypatch):
    """`models` and `convert` choose the platform of their process, which here is that of other tests too."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def test_models_prints_a_row_for_each_family(platform, capsys):
    assert cli.main(["models"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "model_type"
    assert {row.split()[0] for row in rows} == FAMILIES.keys()


def test_models_says_what_a_model_needs(platform, capsys, test_data):
    model = str(test_data / "models/stories260K")
    assert cli.main(["models", model, "--memory", "4MiB", "--dtype", "bfloat16"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"parameters +260,032\n", shown)
    assert re.search(r"weights +0\.99 MiB in float32, 0\.50 MiB in bfloat16, 0\.50 MiB in float16\n", shown)
    assert re.search(r"KV +640 bytes a token in bfloat16\n", shown)
    assert re.search(r"alone +a request of 512 tokens\n", shown)
    assert re.search(r"at once +11 requests of 512 tokens\n", shown)  # 3.5 MiB / (512 * 640 bytes) = 11.2
    assert cli.main(["models", model, "--dtype", "bfloat16", "-tp", "2"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"devices +2; bytes are of each\n", shown)
    assert re.search(r"KV +320 bytes a token in bfloat16\n", shown)
    assert cli.main(["models", model, "--memory", "256KiB"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"fits +not: 0\.25 MiB .* float32 are 0\.74 MiB too little for the weights alone\n", shown)


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
