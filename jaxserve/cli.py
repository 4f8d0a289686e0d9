"""The `jaxserve` command line. Flags come from the config dataclasses; errors are printed as one line.

Heavy modules are imported only when a command needs them, so that `--help` and a mistyped flag answer at once.
"""

import argparse
import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, get_args

from jaxserve import __version__, interrupts, logs, vllm_flags
from jaxserve.arguments import Parser, arguments_of, unknown_variables
from jaxserve.bench.commands import add_commands as add_bench_commands
from jaxserve.config import DType, EngineConfig, Quantization, ServerConfig
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.flags import add_config_flags, add_sampling_flags, given, parse_size
from jaxserve.gpus import GPUS
from jaxserve.planning.commands import add_compile, add_plan, run_compile, run_plan
from jaxserve.request import CompletionOutput, Logprob, RequestOutput
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.llm import LLM

logger = logging.getLogger(__name__)

SHELLS = ("bash", "zsh", "tcsh", "fish", "powershell")
"""The shells that `shtab` writes scripts for."""

_SIZE_FIELDS = (
    *("revision", "dtype", "max_model_len", "gpu_memory_utilization", "kv_cache_dtype"),
    *("tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel"),
)
"""The engine's options that `jaxserve models` takes."""
_BATCH_FIELDS = (
    *("served_model_name", "chat_template", "tool_call_parser", "reasoning_parser", "default_chat_template_kwargs"),
    *("disable_additional_properties", "pooling", "request_timeout", "max_body_size", "log_level", "log_format"),
)
"""Server options that affect the answers to a file of requests."""
_MODEL = "directory, GGUF file, built-in model or id on the hub"
_MAX_NUM_WAITING = 4096  # more than one HTTP request may bring
_GENERATE_TOKENS = 256  # the API's default of 16 would look like a bug at a terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code: 0, 1 (an error, printed as one line), 2 (usage), 130 (Ctrl-C), or a
    code of its own that its help tells.
    """
    try:
        with interrupts.of_command():
            return _run(argv)
    except KeyboardInterrupt:
        return interrupts.EXIT_CODE


def _run(argv: Sequence[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    args, unknown = parser.parse_known_args(arguments_of(argv))
    complaints = _complaints(args) if args.parser.has_settings else []
    args.parser.check(unknown, complaints)
    in_background = getattr(args, "logs_in_background", False)
    logs.configure(args.log_level, getattr(args, "log_format", "text"), in_background=in_background)
    if args.parser.has_settings:
        # A warning: the environment is inherited, and what another version knows must not stop a start.
        for sentence in unknown_variables(os.environ, parser.variables()):
            logger.warning(sentence)
    run: Callable[[argparse.Namespace], int | None] = args.run
    try:
        if complaints:
            raise ConfigError("; ".join(complaints))
        code = run(args) or 0
        sys.stdout.flush()
    except JaxserveError as error:
        if args.log_level == "debug":
            raise
        logs.flush()
        print(f"jaxserve: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `jaxserve generate ... | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _complaints(args: argparse.Namespace) -> list[str]:
    """Return what is wrong with the options of engine and server that were given."""
    complaints = []
    for config in (EngineConfig, ServerConfig):
        try:
            config(**given(args, config))
        except ConfigError as error:
            complaints.append(str(error))
    return complaints


def flags_of_serve() -> dict[str, str]:
    """Return the flags of `jaxserve serve`, all names of each in alphabetical order, and their help."""
    shown = _parser().command("serve").shown()
    return dict(sorted((flag, action.help or "") for action in shown for flag in action.option_strings))


def _parser() -> Parser:
    parser = Parser(prog="jaxserve", usage="COMMAND [options]", description="LLM serving on JAX.")
    parser.add_argument("--version", action="version", version=f"jaxserve {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    # fmt: off
    for name, usage, summary, run, add_flags in (
        ("serve", "[MODEL] [options]", "serve a model over an OpenAI-compatible HTTP API", _serve, _add_serve),
        ("run-batch", "-i FILE -o FILE [options]",
         "answer a file of requests (OpenAI's batch format); ends with 3 if lines were refused",
         _run_batch, _add_run_batch),
        ("generate", "[PROMPT ...] [options]", "continue prompts and print the texts", _generate, _add_generate),
        ("chat", "[MODEL] [options]", "talk with a model; /exit or the end of the input ends it", _chat, _add_chat),
        ("models", "[MODEL] [options]", "the model families, or what one model needs and how much of it fits",
         _models, _add_models),
        ("plan", "[MODEL] --device GPU [options]",
         "what a model takes of a GPU that is not there, and how fast it will be", run_plan, add_plan),
        ("parse", "[MODEL] [options]", "read a model's answer from standard input, and print it as a message",
         _parse, _add_parse),
        ("convert", "SRC DST [options]", "write a model directory whose weights need no conversion",
         _convert, _add_convert),
        ("compile", "[MODEL] --device GPU -o FOLDER [options]",
         "compile an engine's programs for a GPU that is not there, for serve --programs FOLDER",
         run_compile, add_compile),
        ("bench", "BENCHMARK [options]", "measure the engine", None, add_bench_commands),
        ("completion", "SHELL", "print a script that completes commands and flags in a shell",
         _completion, _add_completion),
    ):
        # fmt: on
        command: Parser = commands.add_parser(
            name,
            prog=f"jaxserve {name}",
            usage=usage,
            help=summary,
            description=summary,
            has_settings=run in (_serve, _run_batch, _generate, _chat),
        )
        command.set_defaults(run=run, log_level="warning")
        add_flags(command)
    return parser


def _add_serve(serve: Parser) -> None:
    serve.set_defaults(log_level=ServerConfig().log_level, logs_in_background=True)
    serve.add_argument("served", nargs="?", metavar="MODEL", help="the same as --model")
    add_config_flags(serve, EngineConfig, defaults={"max_num_waiting": _MAX_NUM_WAITING})
    add_config_flags(serve, ServerConfig)
    serve.add_known_flags(vllm_flags.FLAGS)


def _add_run_batch(batch: Parser) -> None:
    add = functools.partial(batch.add_flag, "batch")
    add("-i", "--input-file", required=True, metavar="FILE", help="the requests: one JSON object a line")
    add(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="the answers, written as they come; requests that it answers already are left out",
    )
    add("--overwrite", action="store_true", help="begin the output file anew, and answer all requests")
    add_config_flags(batch, EngineConfig)
    add_config_flags(batch, ServerConfig, only=_BATCH_FIELDS)
    batch.add_known_flags(vllm_flags.FLAGS)


def _add_generate(generate: Parser) -> None:
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="what to continue; none, or -: standard input")
    _add_offline_flags(generate, max_tokens_help=f"tokens to generate; default: the model's, else {_GENERATE_TOKENS}")


def _add_chat(chat: Parser) -> None:
    chat.add_argument("served", nargs="?", metavar="MODEL", help="the same as --model")
    chat.add_flag("chat", "--system", metavar="TEXT", help="the system message")
    _add_offline_flags(
        chat,
        max_tokens_help="tokens of an answer; default: the model's, else all there is room for",
        without=("n", "logprobs", "logprob_token_ids"),
    )


def _add_models(models: Parser) -> None:
    models.add_argument("model", nargs="?", metavar="MODEL", help=f"{_MODEL}; none: the table")
    models.add_flag("sizes", "--memory", type=parse_size, metavar="SIZE", help="a device's; default: an H200's")
    add_config_flags(models, EngineConfig, only=_SIZE_FIELDS)


def _add_parse(parse: Parser) -> None:
    parse.add_argument("model", nargs="?", metavar="MODEL", help=f"whose syntax it is: {_MODEL}")
    _add_revision(parse, "syntax")
    syntax = ("tool_call_parser", "reasoning_parser", "chat_template")
    add_config_flags(parse, ServerConfig, only=syntax, lists_names=True)

    add = functools.partial(parse.add_flag, "answer")
    add("--tools", metavar="FILE", help="JSON list of the tools that are offered; default: any are")
    add("--chunk", type=int, metavar="N", help="characters that are read at once; default: all")
    add("--prompt-ends-with", default="", metavar="TEXT", help="the end of the prompt, which may begin thoughts")


def _add_convert(convert: Parser) -> None:
    convert.add_argument("source", metavar="SRC", help=_MODEL)
    convert.add_argument("destination", metavar="DST", help="the directory to write")
    _add_revision(convert, "store")

    add = functools.partial(convert.add_flag, "store")
    add("--dtype", choices=get_args(DType), default="auto", help="auto: the checkpoint's")
    add("--quantization", "-q", choices=get_args(Quantization), help="round matrices, as serve does")
    add("--dequantize", action="store_true", help="write floats where the source has quantized weights")
    add("--force", action="store_true", help="replace DST, if it was made by convert")


def _add_completion(completion: Parser) -> None:
    *others, last = SHELLS
    completion.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"{', '.join(others)} or {last}")


def _add_revision(parser: Parser, group: str) -> None:
    parser.add_flag(group, "--revision", metavar="REV", help="branch, tag or commit of a model of the hub")


def _add_offline_flags(parser: Parser, *, max_tokens_help: str, without: Sequence[str] = ()) -> None:
    add_sampling_flags(parser, {"max_tokens": max_tokens_help}, without=without)
    add_config_flags(parser, EngineConfig, defaults={"warmup": "none"})  # few of the shapes will be used
    levels = ("debug", "info", "warning", "error")
    parser.add_flag(
        "logging", "--log-level", choices=levels, default="warning", help="what is logged; default: warning"
    )
    parser.add_known_flags(vllm_flags.FLAGS)


def _serve(args: argparse.Namespace) -> int:
    config = EngineConfig(**_engine_options(args))
    server_config = ServerConfig(**given(args, ServerConfig))
    if "model" not in _engine_options(args) and len(server_config.served_model_name) > 1:
        *_, last = server_config.served_model_name
        args.parser.error(f"which model? {last!r} was read as one of its names: write MODEL first, or --model {last}")

    from jaxserve.loading.builtin import resolve_names
    from jaxserve.server.process.supervisor import serve

    names = server_config.served_model_name or (config.model,)
    return serve(resolve_names(config), dataclasses.replace(server_config, served_model_name=names))


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's options that were given. A model that stands alone comes before one of --model."""
    named = {} if getattr(args, "served", None) is None else {"model": args.served}
    return given(args, EngineConfig) | named


def _run_batch(args: argparse.Namespace) -> int:
    config = EngineConfig(**given(args, EngineConfig))
    server_config = ServerConfig(**given(args, _BATCH_FIELDS), access_log=False)

    from jaxserve.answers.choosing.served_tokenizer import served_tokenizer
    from jaxserve.engine.frontend import Frontend, sampling_defaults
    from jaxserve.loading.builtin import resolve_names
    from jaxserve.server import batch
    from jaxserve.tokenizer import Tokenizer

    source, destination = pathlib.Path(args.input_file), pathlib.Path(args.output_file)
    wanted = batch.check_input(source)
    with batch.open_output(destination, wanted, source=source, overwrite=args.overwrite) as output:
        if not wanted.num_lines:  # no model is loaded for it
            output.drop_others()
            return batch.tell(batch.Summary(0, 0, 0), destination)
        names = server_config.served_model_name or (config.model,)
        server_config = dataclasses.replace(server_config, served_model_name=names)
        config = resolve_names(config)
        tokenizer = served_tokenizer(Tokenizer.load(config.tokenizer or config.model), server_config)
        defaults = sampling_defaults(config.model)

        from jaxserve.engine.local import LocalEngineClient

        with contextlib.closing(LocalEngineClient.start(config, progress=True, owns_process=True)) as client:
            frontend = Frontend(client, tokenizer, default_sampling=defaults, seed=config.seed)
            summary = batch.run(frontend, server_config, source=source, output=output)
    return batch.tell(summary, destination)


def _models(args: argparse.Namespace) -> None:
    platforms = os.environ.get("JAX_PLATFORMS", "")
    os.environ["JAX_PLATFORMS"] = "cpu"  # no GPU is needed, and the GPU may be in use
    from jaxserve import overview

    memory = GPUS["h200"].memory if args.memory is None else args.memory
    if args.model is None:
        if args.memory is not None or given(args, _SIZE_FIELDS):
            args.parser.error("which MODEL? without one there is the table of families, which no flag changes")
        print(overview.families_text())
    else:
        config = EngineConfig(model=args.model, **given(args, _SIZE_FIELDS))
        found = overview.needs(config, memory=memory)
        from jaxserve.answers.choosing.choice import rows_of
        from jaxserve.loading.builtin import resolve_model
        from jaxserve.planning.here import rows_here, uses_gpu

        syntax = rows_of(resolve_model(config.model, revision=config.revision, with_weights=False))
        here = [] if uses_gpu(platforms) else rows_here(config)
        print(overview.needs_text(args.model, found, memory=memory, here=here, more=syntax))


def _parse(args: argparse.Namespace) -> None:
    config = ServerConfig(**given(args, ServerConfig))

    from jaxserve import parse

    choice = parse.choose_syntax(args.model, config, revision=args.revision)
    for title, text in choice.rows():
        print(f"{title}: {text}", file=sys.stderr)
    tools = None if args.tools is None else parse.read_tools(args.tools)
    text = sys.stdin.buffer.read().decode(errors="replace")
    message = parse.parse(text, choice.syntax, tools=tools, chunk=args.chunk, prompt_end=args.prompt_ends_with)
    if tools is not None:
        for name in parse.not_offered(text, choice.syntax, tools, prompt_end=args.prompt_ends_with):
            print(f"not offered: {name}", file=sys.stderr)
    print(parse.as_json(message))


def _convert(args: argparse.Namespace) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"  # as above
    from jaxserve.convert import convert

    manifest = convert(**given(args, convert))
    print(f"{args.destination}: {len(manifest.arrays)} arrays in {manifest.dtype}, from {manifest.source.name}")


def _generate(args: argparse.Namespace) -> int:
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in args.prompts or ["-"]]
    with _open(args, max_tokens=_GENERATE_TOKENS) as (llm, params):
        if len(prompts) == 1 and params.n == 1:
            deltas = llm.stream(prompts[0], params)  # raises for a refused prompt before it is printed
            print(prompts[0], end="", flush=True)
            completion = _print_stream(deltas)
            _print_logprobs(completion)
            return 0
        outputs = llm.generate(prompts, params)
        for number, output in enumerate(outputs, 1):
            for completion in output.outputs:
                sample = f", {completion.index + 1} of {params.n}" if params.n > 1 else ""
                print(f"==> prompt {number} of {len(prompts)}{sample} <==\n{output.prompt}{completion.text}\n")
                _print_logprobs(completion)
    return int(any(completion.finish_reason == "error" for output in outputs for completion in output.outputs))


def _chat(args: argparse.Namespace) -> None:
    from jaxserve.chat import Chat

    with _open(args, max_tokens=None) as (llm, params):
        Chat(llm, params, system=args.system).run()


def _completion(args: argparse.Namespace) -> None:
    import shtab

    print(shtab.complete(_parser(), args.shell))


@contextlib.contextmanager
def _open(args: argparse.Namespace, *, max_tokens: int | None) -> "Iterator[tuple[LLM, SamplingParams]]":
    """Open the model and the sampling parameters of the command line; invalid ones are reported before the model is
    loaded.

    `max_tokens` is the default for a model that recommends none.
    """
    sampling = given(args, SamplingParams.__struct_fields__)
    fallback: dict[str, Any] = {"max_tokens": max_tokens}
    SamplingParams(**(fallback | sampling))
    from jaxserve.llm import LLM

    with LLM(**_engine_options(args)) as llm:
        yield llm, llm.sampling_params(sampling, fallback=fallback)


def _print_stream(deltas: Iterator[RequestOutput]) -> CompletionOutput:
    """Print the text of a stream as it arrives, end the line, and return the whole completion."""
    logprobs: list[dict[int, Logprob]] = []
    whole = CompletionOutput(index=0, token_ids=[], logprobs=logprobs)
    for delta in deltas:
        (news,) = delta.outputs
        print(news.text, end="", flush=True)
        whole.text += news.text
        whole.token_ids += news.token_ids
        logprobs += news.logprobs or []
    print(flush=True)
    return whole


def _print_logprobs(completion: CompletionOutput) -> None:
    """Print one line per token: the token and the most likely ones, each with its log probability and rank."""

    def show(candidate: Logprob) -> str:
        return f"{candidate.decoded_token!r} {candidate.logprob:.4f} #{candidate.rank}"

    for token_id, candidates in zip(completion.token_ids, completion.logprobs or [], strict=False):
        others = [show(candidate) for other, candidate in candidates.items() if other != token_id]
        print("  ".join([show(candidates[token_id]), *others]))
