"""The flags of `jaxserve bench ...`, one function a benchmark."""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Callable

from jaxserve.bench import bits_per_byte, host, latency, throughput
from jaxserve.bench.workloads import LLAMA_100M, LLAMA_HOST, mixed_jobs
from jaxserve.config import EngineConfig
from jaxserve.flags import Parser, add_config_flags, given

PEER_PYTHON = pathlib.Path(".venv-goldens/bin/python")
_ENGINE_FIELDS = tuple(field.name for field in dataclasses.fields(EngineConfig))


def add_commands(parser: Parser) -> None:
    """Add the benchmarks to `jaxserve bench` as its commands."""
    commands = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)

    def add(name: str, summary: str, run: Callable[[argparse.Namespace], None]) -> Parser:
        command: Parser = commands.add_parser(
            name, prog=f"jaxserve bench {name}", usage="[options]", help=summary, description=summary
        )
        command.set_defaults(run=run)
        return command

    mixed = add("throughput", "continuous and static batching, and transformers, on the same requests", _throughput)
    _add_number(mixed, "--num-requests", 64, "requests, all there at the start")
    _add_number(mixed, "--input-len", 160, "mean prompt length")
    _add_number(mixed, "--output-len", 128, "mean output length")
    _add_number(mixed, "--max-num-seqs", 16, "requests that run at once, and the static batch")
    _add_number(mixed, "--seed", 0, "seed of lengths and tokens")
    mixed.add_flag(
        "workload",
        "--peer-python",
        metavar="PATH",
        help=f"interpreter with torch and transformers, '' for none; default: {PEER_PYTHON}, if it is there",
    )

    step = add("host", "host time of a decode step, by phase", _host)
    _add_number(step, "--num-requests", 256, "requests that run at once")
    _add_number(step, "--input-len", 64, "prompt length")
    _add_number(step, "--num-steps", 200, "steps to measure")

    batch = add("latency", "time of a batch of equal requests, on any model", _latency)
    _add_number(batch, "--batch-size", 1, "requests, submitted together")
    _add_number(batch, "--input-len", 128, "prompt length")
    _add_number(batch, "--output-len", 128, "output length")
    add_config_flags(batch, EngineConfig, defaults={"warmup": False, "enable_prefix_caching": False})

    text = add("bits-per-byte", "how well a model predicts a text, beside xz -9", _bits_per_byte)
    text.add_flag("workload", "--text", type=pathlib.Path, required=True, metavar="FILE", help="text to predict, UTF-8")
    add_config_flags(text, EngineConfig, defaults={"warmup": False, "enable_prefix_caching": False})


def _add_number(parser: Parser, name: str, default: int, text: str) -> None:
    parser.add_flag("workload", name, type=int, default=default, metavar="N", help=f"{text}; default: {default}")


def _throughput(args: argparse.Namespace) -> None:
    peer = args.peer_python
    if peer is None and PEER_PYTHON.exists():
        peer = str(PEER_PYTHON)
    elif peer is None:
        print(f"transformers is left out: there is no {PEER_PYTHON} (make goldens)", file=sys.stderr)
    jobs = mixed_jobs(
        args.num_requests,
        mean_input=args.input_len,
        mean_output=args.output_len,
        seed=args.seed,
        vocab_size=LLAMA_100M["vocab_size"],
    )
    engine = EngineConfig(dtype="float32", max_num_seqs=args.max_num_seqs, enable_prefix_caching=False, attention="xla")
    print(throughput.run(jobs, model_config=LLAMA_100M, engine=engine, peer_python=peer or None))


def _host(args: argparse.Namespace) -> None:
    report = host.run(LLAMA_HOST, num_requests=args.num_requests, input_len=args.input_len, num_steps=args.num_steps)
    print(report)


def _latency(args: argparse.Namespace) -> None:
    shape = {"batch_size": args.batch_size, "input_len": args.input_len, "output_len": args.output_len}
    print(latency.run(EngineConfig(**given(args, _ENGINE_FIELDS)), **shape))


def _bits_per_byte(args: argparse.Namespace) -> None:
    print(bits_per_byte.run(EngineConfig(**given(args, _ENGINE_FIELDS)), text_path=args.text))
