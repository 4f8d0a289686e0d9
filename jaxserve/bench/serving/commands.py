"""The flags of `jaxserve bench serve` and `jaxserve bench load-curve`."""

import argparse
import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from jaxserve import vllm_flags
from jaxserve.arguments import Parser
from jaxserve.bench.flags import add_flag, add_number, add_shape, positive
from jaxserve.bench.served import served, write_tokenizer
from jaxserve.bench.serving.options import CURVE_FIELDS, ServingOptions
from jaxserve.bench.shapes import SHAPES, write_config
from jaxserve.errors import InvalidRequest
from jaxserve.flags import add_config_flags, given

ADDRESS = ("--host", "--port", "--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs")
"""Flags of `jaxserve serve` that decide where and how it is reached."""


def add_serving_commands(add: Callable[[str, str, Callable[[argparse.Namespace], int | None]], Parser]) -> None:
    """Add both commands; `add` makes one from its name, a summary and what runs it."""
    serving = add("serve", "load on any OpenAI-compatible server over HTTP, and what its clients see", _serving)
    add_config_flags(serving, ServingOptions)
    serving.add_flag("server", "--served-model-name", metavar="TEXT", help="as --model, which then is the tokenizer")
    serving.add_flag("server", "--host", metavar="TEXT", help="host of the address, with --port in place of --url")
    serving.add_flag("server", "--port", type=int, metavar="N", help="port of the address; default: 8000")
    serving.add_flag(
        "report",
        "--goodput",
        nargs="+",
        default=(),
        metavar="NAME:MS",
        help="objectives, such as ttft:200 tpot:50 e2e:5000",
    )
    serving.add_known_flags(vllm_flags.BENCH_FLAGS)

    curve = add("load-curve", "what clients see at shares of a server's capacity, as a table and a picture", _curve)
    add_config_flags(curve, ServingOptions, only=CURVE_FIELDS)
    add_shape(curve)
    add_number(curve, "--at-once", 256, "requests that are kept running to measure the capacity")
    add_flag(
        curve, "--loads", type=positive, nargs="+", default=(0.25, 0.5, 0.75, 0.9), metavar="X", help="of the capacity"
    )
    add_flag(curve, "--seconds", type=positive, default=10.0, metavar="S", help="length of each run; default: 10")
    add_flag(
        curve, "--trace", metavar="FILE", help="also the arrivals and lengths of Azure's (.csv) or Mooncake's (.jsonl)"
    )
    add_flag(
        curve,
        "--levels",
        nargs="+",
        default=("ttft:200,tpot:25", "ttft:1000,tpot:50"),
        metavar="NAME:MS,...",
        help="service levels, for goodput; default: ttft:200,tpot:25 and ttft:1000,tpot:50",
    )
    add_flag(
        curve, "--draw", type=pathlib.Path, metavar="FILE", help="draw what --save-json wrote, and measure nothing"
    )
    add_flag(
        curve,
        "--serve",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="start `jaxserve serve` with all arguments that follow (of a --shape: but the model), in place of --url",
    )


@contextlib.contextmanager
def _needs_bench() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise InvalidRequest(f"{error.name} is not installed: pip install 'jaxserve[bench]'") from error


def _name(argument: str) -> str:
    return argument.partition("=")[0]


def _curve(args: argparse.Namespace) -> int:
    with _needs_bench():
        from jaxserve.bench.serving import curve
        from jaxserve.bench.serving.summary import parse_slos
    if args.draw is not None:
        curve.draw(args.draw, ServingOptions(**given(args, CURVE_FIELDS)).save_plot)
        return 0
    levels = [parse_slos(level.split(",")) for level in args.levels]
    chosen = curve.CurveOptions(
        loads=args.loads, seconds=args.seconds, levels=levels, trace=args.trace, at_once=args.at_once
    )
    options: dict[str, Any] = given(args, CURVE_FIELDS)
    if args.shape is None and args.serve is None:
        return curve.run(ServingOptions(**options), chosen)
    if "url" in options:
        args.parser.error("--url, and --shape or --serve, exclude each other")
    if unfit := [flag for flag in map(_name, args.serve or ()) if flag in ADDRESS]:
        args.parser.error(f"{unfit[0]}: --serve listens on a port of its own, at 127.0.0.1, without TLS")
    with tempfile.TemporaryDirectory() as name:
        folder, serve = pathlib.Path(name), args.serve or []
        if args.shape is not None:
            model = write_config(folder / "model", SHAPES[args.shape])
            write_tokenizer(model, SHAPES[args.shape]["vocab_size"])
            serve = [str(model), "--load-format", "dummy", *serve]
            options.setdefault("tokenizer", str(model))
        load = ServingOptions(**options)
        with served(serve, log=folder / "log") as url:
            return curve.run(dataclasses.replace(load, url=url), chosen)


def _serving(args: argparse.Namespace) -> int:
    with _needs_bench():
        from jaxserve.bench.serving.run import run
    options: dict[str, Any] = given(args, ServingOptions)
    if args.served_model_name is not None:
        options = {"tokenizer": options.get("model")} | options | {"model": args.served_model_name}
    if args.host is not None or args.port is not None:
        if "url" in options:
            args.parser.error("--url and --host or --port exclude each other")
        options["url"] = f"http://{args.host or '127.0.0.1'}:{args.port or 8000}"
    return run(ServingOptions(**options), goodput=args.goodput)
