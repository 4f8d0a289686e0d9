"""The flags of `jaxserve bench ...`, one function per benchmark."""

import argparse
import dataclasses
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import get_args

from jaxserve.arguments import Parser
from jaxserve.bench import bits_per_byte, full_load, latency, load, speculation, start, steps, throughput
from jaxserve.bench.flags import add_flag, add_number, add_shape, at_least, positive
from jaxserve.bench.serving.commands import add_serving_commands
from jaxserve.bench.shapes import LLAMA_100M, SHAPES, SMALL_SHAPES, eagle3_head, write_config
from jaxserve.bench.workloads import BatchShape, mixed_jobs
from jaxserve.config import DEFAULT_MODEL, EngineConfig, KVCacheDType, Quantization
from jaxserve.flags import add_config_flags, given, parse_object, parse_size
from jaxserve.loading.builtin import resolve_tokenizer
from jaxserve.speculation import with_acceptance

PEER_PYTHON = pathlib.Path(".venv-goldens/bin/python")


def add_commands(parser: Parser) -> None:
    """Add the benchmarks as subcommands of `jaxserve bench`."""
    commands = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)

    def add(name: str, summary: str, run: Callable[[argparse.Namespace], int | None]) -> Parser:
        command: Parser = commands.add_parser(
            name, prog=f"jaxserve bench {name}", usage="[options]", help=summary, description=summary
        )
        command.set_defaults(run=run)
        return command

    # fmt: off
    for name, summary, run, add_flags in (
        ("throughput", "continuous and static batching, and transformers, on the same requests",
         _throughput, _add_throughput),
        ("latency", "time of batches of equal requests, on any model, beside a floor and a peer",
         _latency, _add_latency),
        ("full-load", "tokens a second when all requests are there at the start, beside a peer",
         _full_load, _add_full_load),
        ("steps", "time of each step of batches of equal requests, and of the GPU's kernels in them",
         _steps, _add_steps),
        ("bits-per-byte", "how well a model predicts a text, beside xz -9", _bits_per_byte, _add_bits_per_byte),
        ("kv-rounding", "how far keys and values in 8 bits move log probabilities, each apart",
         _kv_rounding, _add_kv_rounding),
        ("speculation", "what speculative decoding gains, in turns with an engine without it",
         _speculation, _add_speculation),
        ("load", "time and memory of loading a generated checkpoint: safetensors, GGUF, a store",
         _printed(load.run), _add_load),
        ("start", "seconds from `jaxserve serve` to the first token, by phase, without and with cached programs",
         _printed(start.run), _add_start),
        ("server", "CPU time of the API side for a streamed token, over an engine stub", _server, _add_server),
        ("grammar", "host time of the masks of requests that follow a grammar", _grammar, _add_grammar),
        ("parsing", "how fast answers are read in each syntax, and the worst input", _parsing, _add_parsing),
    ):
        # fmt: on
        add_flags(add(name, summary, run))
    add_serving_commands(add)


def _add_throughput(mixed: Parser) -> None:
    add_number(mixed, "--num-requests", 64, "requests, all there at the start")
    add_number(mixed, "--input-len", 160, "mean prompt length")
    add_number(mixed, "--output-len", 128, "mean output length")
    add_number(mixed, "--max-num-seqs", 16, "requests that run at once, and the static batch")
    add_number(mixed, "--seed", 0, "seed of lengths and tokens", least=0)
    add_flag(
        mixed,
        "--peer-python",
        metavar="PATH",
        help=f"interpreter with torch and transformers, '' for none; default: {PEER_PYTHON}, if it is there",
    )


def _add_latency(batch: Parser) -> None:
    _add_batches(batch, default="the peer's, or 1:128:128")
    add_flag(batch, "--peer", type=pathlib.Path, metavar="FILE", help="what another engine took, as JSON")
    add_flag(batch, "--peer-entry", metavar="NAME", help="the entry of that file; default: its first one")
    _add_bandwidth(batch)
    add_flag(batch, "--profile", action="store_true", help="trace how much of the time the GPU is at work")
    add_flag(
        batch,
        "--synthetic-acceptance",
        type=float,
        metavar="TOKENS",
        help="draft, and accept by chance so many tokens a step on average; the text is not the model's",
    )
    add_flag(
        batch, "--save-json", type=pathlib.Path, metavar="FILE", help="write what `jaxserve plan --measured` reads"
    )
    _add_beside(batch, "time the model with its matrices rounded so, too, instead of against a peer or a floor")
    add_config_flags(batch, EngineConfig, defaults={"warmup": "none", "enable_prefix_caching": False})


def _add_full_load(full: Parser) -> None:
    add_flag(
        full,
        "--settings",
        nargs="+",
        required=True,
        metavar="IN:OUT:N",
        help="prompt and output length, and number of requests",
    )
    add_shape(full)
    add_flag(full, "--peer", type=pathlib.Path, metavar="FILE", help="tables of another engine, as JSON")
    add_flag(full, "--peer-entry", metavar="NAME", help="the table of that file; default: its first one")
    _add_bandwidth(full)
    add_flag(full, "--profile", action="store_true", help="run each again, and list the GPU's kernels in its middle")
    add_config_flags(full, EngineConfig, defaults={"warmup": "full", "enable_prefix_caching": False})


def _add_steps(each: Parser) -> None:
    _add_batches(each, default="1:128:128")
    add_flag(each, "--profile", action="store_true", help="list the GPU's kernels in the second half of a run")
    add_config_flags(each, EngineConfig, defaults={"warmup": "none", "enable_prefix_caching": False})


def _add_bits_per_byte(text: Parser) -> None:
    add_flag(text, "--text", type=pathlib.Path, required=True, metavar="FILE", help="text to predict, UTF-8")
    _add_beside(text, "round matrices so, too, and print the differences")
    add_flag(
        text,
        "--beside-kv",
        nargs="*",
        default=(),
        choices=get_args(KVCacheDType),
        metavar="DTYPE",
        help="hold keys and values so, too, and print the differences",
    )
    add_config_flags(text, EngineConfig, defaults={"warmup": "none", "enable_prefix_caching": False})


def _add_kv_rounding(rounding: Parser) -> None:
    add_flag(rounding, "--text", type=pathlib.Path, metavar="FILE", help="text to predict, UTF-8")
    add_flag(
        rounding,
        "--shapes",
        nargs="+",
        default=(),
        choices=sorted(SMALL_SHAPES),
        metavar="NAME",
        help="small models of random weights, in place of a model and a text: " + ", ".join(sorted(SMALL_SHAPES)),
    )
    add_number(rounding, "--num-tokens", 8192, "tokens of the text, from the first on, or random ones", least=2)
    add_flag(
        rounding,
        "--outliers",
        type=positive,
        nargs="*",
        default=(16.0, 128.0),
        metavar="FACTOR",
        help="multiply a channel of each key by these, and divide that of queries; default: 16 128",
    )
    add_config_flags(rounding, EngineConfig, defaults={"dtype": "float32", "kernels": "xla", "warmup": "none"})


def _add_speculation(drafts: Parser) -> None:
    drafts.add_flag("workload", "--workload", type=pathlib.Path, metavar="FILE", help="Spec-Bench, or a .txt")
    drafts.add_flag("workload", "--category", metavar="NAME", help="of its prompts; default: all")
    add_number(drafts, "--num-prompts", 16, "prompts, from the first on")
    drafts.add_flag(
        "workload",
        "--synthetic-acceptance",
        type=float,
        nargs="+",
        default=(),
        metavar="TOKENS",
        help="random prompts instead, and drafts accepted by chance, so many tokens a step that verifies some (1: none "
        "is accepted)",
    )
    add_number(drafts, "--input-len", 1, "tokens of each random prompt")
    add_number(drafts, "--output-len", 128, "tokens of each text")
    help_at_once = "requests that run; default: 1"
    add_flag(drafts, "--at-once", type=at_least(1), nargs="+", default=(1,), metavar="N", help=help_at_once)
    add_number(drafts, "--num-pairs", 3, "measurements with speculation, each beside one without")
    drafts.add_flag("workload", "--temperature", type=float, default=0.0, metavar="X", help="default: 0")
    add_flag(
        drafts, "--beside", type=parse_object, nargs="*", default=(), metavar="JSON", help="further speculative configs"
    )
    add_shape(drafts)
    add_config_flags(drafts, EngineConfig, defaults={"warmup": "none", "enable_prefix_caching": False})


def _add_load(loading: Parser) -> None:
    add_flag(loading, "--size", type=parse_size, default=2**30, metavar="SIZE", help="of the checkpoint; default: 1GiB")
    dtypes = ("float32", "bfloat16", "float16")
    add_flag(loading, "--stored", choices=dtypes, default="bfloat16", help="its dtype; default: bfloat16")
    add_flag(loading, "--dtype", choices=dtypes, default="bfloat16", help="dtype to load it as; default: bfloat16")
    add_flag(loading, "--folder", type=pathlib.Path, metavar="DIR", help="where all are written and removed")
    add_number(loading, "--num-runs", 3, "loads of each kind, in one process")
    add_flag(loading, "--with-orbax", action="store_true", help="restore the store by Orbax too")


def _add_start(first: Parser) -> None:
    add_flag(first, "--model", default=DEFAULT_MODEL, metavar="MODEL", help="default: the built-in model")
    add_flag(first, "--install", action="store_true", help="install the clone into a new environment before")


def _add_server(cost: Parser) -> None:
    add_number(cost, "--num-streams", 256, "clients that stream at once")
    add_number(cost, "--tokens-per-second", 20, "tokens a second that each of them gets")
    add_number(cost, "--seconds", 10, "how long to measure")
    add_number(cost, "--num-probes", 100, "short requests, with and without the load", least=2)
    add_number(cost, "--api-workers", 1, "processes of the API side")
    add_flag(cost, "--chat", dest="is_chat", action="store_true", help="stream chats instead of completions")


def _add_grammar(masks: Parser) -> None:
    add_flag(
        masks, "--tokenizer", default=DEFAULT_MODEL, metavar="MODEL", help="whose tokens; default: the built-in model's"
    )
    add_flag(masks, "--grammar", choices=("json_object", "schema"), default="json_object", help="default: json_object")
    add_flag(masks, "--num-requests", type=int, nargs="+", default=(1, 16, 64), metavar="N", help="that run at once")
    add_number(masks, "--num-steps", 100, "steps to measure", least=2)
    add_number(masks, "--seed", 0, "seed of the texts", least=0)


def _add_parsing(reading: Parser) -> None:
    add_flag(reading, "--syntax", dest="names", nargs="+", default=(), metavar="NAME", help="default: all of them")
    add_number(reading, "--num-characters", 32000, "characters of each input")


def _printed(run: Callable[..., str]) -> Callable[[argparse.Namespace], None]:
    """Return the command that prints what a benchmark reports."""
    return lambda args: print(run(**given(args, run)))


def _add_batches(parser: Parser, *, default: str) -> None:
    add_flag(
        parser,
        "--batches",
        nargs="+",
        metavar="B:IN:OUT",
        help=f"requests submitted together, prompt and output length; default: {default}",
    )
    add_shape(parser)


def _add_bandwidth(parser: Parser) -> None:
    add_flag(
        parser, "--bandwidth", type=positive, metavar="TB/S", help="of a GPU's memory, for the floor (an H200: 4.3)"
    )


def _add_beside(parser: Parser, text: str) -> None:
    add_flag(parser, "--beside", nargs="*", default=(), choices=get_args(Quantization), help=text)


def _throughput(args: argparse.Namespace) -> None:
    peer = args.peer_python
    if peer is None and PEER_PYTHON.exists():
        peer = str(PEER_PYTHON)
    elif peer is None:
        print(f"transformers is left out: there is no {PEER_PYTHON} (make goldens)", file=sys.stderr)
    elif peer and shutil.which(peer) is None:
        args.parser.error(f"--peer-python: {peer} is no interpreter")
    jobs = mixed_jobs(
        args.num_requests,
        mean_input=args.input_len,
        mean_output=args.output_len,
        seed=args.seed,
        vocab_size=LLAMA_100M["vocab_size"],
    )
    engine = EngineConfig(
        dtype="float32", max_num_seqs=args.max_num_seqs, enable_prefix_caching=False, kernels="xla", warmup="full"
    )
    print(throughput.run(jobs, model_config=LLAMA_100M, engine=engine, peer_python=peer or None))


def _latency(args: argparse.Namespace) -> None:
    of_one = {
        "--peer": args.peer,
        "--peer-entry": args.peer_entry,
        "--bandwidth": args.bandwidth,
        "--profile": args.profile,
        "--save-json": args.save_json,
    }
    if args.beside and (unused := [flag for flag, value in of_one.items() if value]):
        args.parser.error(f"{', '.join(unused)}: not with --beside")
    if args.save_json is not None and not args.save_json.absolute().parent.is_dir():
        args.parser.error(f"--save-json: there is no folder for {args.save_json}")
    _check_peer(args)
    peer = latency.read_peer(args.peer, args.peer_entry) if args.peer else []
    batches = [BatchShape.parse(text) for text in args.batches or ()]
    batches = batches or [BatchShape(row.B, row.i, row.o) for row in peer] or [BatchShape(1, 128, 128)]
    bandwidth = args.bandwidth and args.bandwidth * 1e12
    with tempfile.TemporaryDirectory() as folder:
        config = _config_of_batches(args, folder)
        if args.synthetic_acceptance is not None:
            config = dataclasses.replace(
                config, speculative_config=with_acceptance(config.speculative_config, args.synthetic_acceptance)
            )
        if args.beside:
            print(latency.beside(config, batches, quantizations=args.beside))
            return
        report = latency.run(
            config,
            batches,
            peer=peer,
            bandwidth=bandwidth,
            profile=args.profile,
            shape_name=args.shape,
            save_json=args.save_json,
        )
        print(report)


def _full_load(args: argparse.Namespace) -> None:
    _check_peer(args)
    peer = full_load.read_peer(args.peer, args.peer_entry) if args.peer else {}
    settings = [BatchShape.parse_setting(text) for text in args.settings]
    bandwidth = args.bandwidth and args.bandwidth * 1e12
    with tempfile.TemporaryDirectory() as folder:
        config = _config_of_batches(args, folder)
        print(full_load.run(config, settings, peer=peer, bandwidth=bandwidth, profile=args.profile))


def _steps(args: argparse.Namespace) -> None:
    batches = [BatchShape.parse(text) for text in args.batches or ["1:128:128"]]
    with tempfile.TemporaryDirectory() as folder:
        for report in steps.run(_config_of_batches(args, folder), batches, profile=args.profile):
            print(report, end="\n\n", flush=True)


def _check_peer(args: argparse.Namespace) -> None:
    if args.peer_entry is not None and args.peer is None:
        args.parser.error("--peer-entry: of which --peer?")


def _config_of_batches(args: argparse.Namespace, folder: str) -> EngineConfig:
    """Return the config of the model that the flags name, or of a shape, whose config.json is written to `folder`, and
    that of an EAGLE-3 head for it, if one is wanted.
    """
    given_config = given(args, EngineConfig)
    if args.shape:
        if "model" in given_config:
            args.parser.error("--model and --shape exclude each other")
        path = write_config(pathlib.Path(folder), SHAPES[args.shape])
        given_config |= {"model": str(path), "load_format": "dummy"}
        drafts = given_config.get("speculative_config") or {}
        if drafts.get("method") == "eagle3" and "model" not in drafts:
            shape = SHAPES[args.shape] | (given_config.get("hf_overrides") or {})
            head = write_config(path / "head", eagle3_head(shape))
            given_config["speculative_config"] = drafts | {"model": str(head)}
    return EngineConfig(**given_config)


def _server(args: argparse.Namespace) -> None:
    from jaxserve.bench import server_cost  # imported late: it starts a server, which is too heavy for `--help`

    load = server_cost.Load(**given(args, server_cost.Load), step_seconds=1 / args.tokens_per_second)
    print(server_cost.report(load, server_cost.run(load)))


def _grammar(args: argparse.Namespace) -> None:
    from jaxserve.bench import grammar_cost  # imported late: llguidance and a tokenizer are too heavy for `--help`
    from jaxserve.tokenizer import Tokenizer

    args.tokenizer = Tokenizer.load(resolve_tokenizer(args.tokenizer))
    print(grammar_cost.run(**given(args, grammar_cost.run)))


def _parsing(args: argparse.Namespace) -> None:
    from jaxserve.bench import parsing_cost  # imported late: the server is too heavy for `--help`

    print(parsing_cost.run(**given(args, parsing_cost.run)))


def _bits_per_byte(args: argparse.Namespace) -> None:
    config = EngineConfig(**given(args, EngineConfig))
    print(bits_per_byte.run(config, text_path=args.text, quantizations=args.beside, kv_cache_dtypes=args.beside_kv))


def _kv_rounding(args: argparse.Namespace) -> None:
    from jaxserve.bench import kv_rounding  # imported late: a tokenizer is too heavy for `--help`

    if bool(args.text) == bool(args.shapes):
        args.parser.error("--text and --shapes: one of them must be given")
    config, options = EngineConfig(**given(args, EngineConfig)), {"num_tokens": args.num_tokens}
    if args.text:
        print(kv_rounding.of_text(config, text_path=args.text, outliers=args.outliers, **options))
        return
    for report in kv_rounding.of_shapes(config, args.shapes, outliers=args.outliers, **options):
        print(report, end="\n\n", flush=True)


def _speculation(args: argparse.Namespace) -> None:
    if bool(args.synthetic_acceptance) == bool(args.workload):
        args.parser.error("--workload and --synthetic-acceptance: one of them must be given")
    of_workloads = {"--category": args.category, "--beside": args.beside, "--temperature": args.temperature}
    if args.synthetic_acceptance and (unused := [flag for flag, value in of_workloads.items() if value]):
        args.parser.error(f"{', '.join(unused)}: only for a --workload")
    with tempfile.TemporaryDirectory() as folder:
        config = _config_of_batches(args, folder)
        if args.synthetic_acceptance:
            options = given(args, speculation.by_chance)
            print(speculation.by_chance(config, lengths=args.synthetic_acceptance, **options))
            return
        configs = [config, *(dataclasses.replace(config, speculative_config=fields) for fields in args.beside)]
        for each in configs:
            print(speculation.of_workload(each, **given(args, speculation.of_workload)), end="\n\n")
