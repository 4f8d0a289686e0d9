"""The flags of `jaxserve plan` and `jaxserve compile`."""

import argparse
import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator

from jaxserve.arguments import Parser
from jaxserve.bench.shapes import SHAPES, write_config
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.flags import add_config_flags, given
from jaxserve.gpus import GPUS, Gpu, find_gpu

DOES_NOT_FIT = 3
"""Exit code of a plan whose model does not fit, or does not meet the target."""

ENGINE_FIELDS = (
    *("revision", "dtype", "quantization", "max_model_len", "hf_overrides", "block_size", "kv_cache_memory"),
    *("gpu_memory_utilization", "kv_cache_dtype", "max_num_seqs", "max_num_batched_tokens", "max_logprobs"),
    *("speculative_config", "tensor_parallel_size", "enable_expert_parallel", "kernels", "dequantize"),
    *("quantize_activations", "max_cached_states"),
)
"""The engine's options that decide what a step is, and how much of it fits."""

STAGES = "pipeline_parallel_size"
"""The option of plans alone: programs of several stages are not compiled ahead."""


def add_plan(plan: Parser) -> None:
    """Add the flags of `jaxserve plan`."""
    add_model(plan)
    add = functools.partial(plan.add_flag, "plan")
    number = {"type": int, "metavar": "N"}
    add("--input-len", help="tokens of a prompt; default: 1024, at most half the context", **number)
    add("--output-len", help="tokens of an answer; default: 256, at most a quarter of the context", **number)
    add("--target-tpot", type=float, metavar="MS", help="most milliseconds from token to token; default: any")
    add("--num-devices", default=8, help="devices for the table of ways to split; default: 8", **number)
    add(
        "--compile",
        dest="compiling",
        choices=("few", "splits", "all", "none"),
        default="few",
        help="which programs are compiled for the absent GPU: those that decide how much memory steps need, and "
        "decode (few, the default), the same for each way to split (splits), all that the engine has, which takes "
        "minutes, or none: sizes are computed",
    )
    add_config_flags(plan, EngineConfig, only=(STAGES,))
    add(
        "--measured",
        type=pathlib.Path,
        nargs="+",
        default=(),
        metavar="FILE",
        help="what `jaxserve bench latency --save-json` wrote: print what the plan says of these engines beside it, in "
        "place of a plan",
    )
    add("--json", action="store_true", help="print the plan as JSON")


def add_model(parser: Parser) -> None:
    """Add the flags that name a model, a GPU, and the options of its engine."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="directory (config.json will do), GGUF file, id on the hub"
    )
    add = functools.partial(parser.add_flag, "plan")
    add("--shape", choices=sorted(SHAPES), help="a model of this shape, in place of MODEL")
    add("--device", required=True, metavar="GPU", help=f"the GPU, which need not be there: {', '.join(GPUS)}")
    add_config_flags(parser, EngineConfig, only=ENGINE_FIELDS)


def run_plan(args: argparse.Namespace) -> int:
    """Print a plan. Returns 0, or DOES_NOT_FIT."""
    for name in ("input_len", "output_len", "num_devices"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if args.target_tpot is not None and not args.target_tpot > 0:
        raise ConfigError(f"--target-tpot must be positive, got {args.target_tpot:g}")
    gpu = find_gpu(args.device)
    if args.measured:
        return _compare(args, gpu)
    with model_of(args) as (config, name):
        prepare_jax()
        import msgspec

        from jaxserve.planning.plan import Load, make_plan
        from jaxserve.planning.text import plan_text

        load = Load(input_len=args.input_len, output_len=args.output_len, target_tpot=args.target_tpot)
        plan = make_plan(
            config,
            gpu,
            load,
            name=name,
            compiling=args.compiling,
            num_devices=args.num_devices,
            progress=functools.partial(_tell, f"compiling for {gpu.kind}:"),
        )
    print(msgspec.json.format(msgspec.json.encode(plan)).decode() if args.json else plan_text(plan))
    return 0 if plan.fits else DOES_NOT_FIT


def _compare(args: argparse.Namespace, gpu: Gpu) -> int:
    """Print a plan of each measured engine beside the measurement."""
    if args.model is not None or args.shape is not None or given(args, (*ENGINE_FIELDS, STAGES)):
        raise ConfigError("--measured files say which model and options they are of: leave both out")
    of_plans = ("input_len", "output_len", "target_tpot", "json")
    if unused := [f"--{name.replace('_', '-')}" for name in of_plans if getattr(args, name)]:
        raise ConfigError(f"{', '.join(unused)}: not with --measured")
    prepare_jax()
    from jaxserve.bench.latency import read_run
    from jaxserve.planning.compared import compared

    told = functools.partial(_tell, f"compiling for {gpu.kind}:")
    for run in [read_run(path) for path in args.measured]:
        with tempfile.TemporaryDirectory() as folder:
            config = run.engine
            if run.shape is not None:
                model = write_config(pathlib.Path(folder), SHAPES[run.shape])
                config = dataclasses.replace(config, model=str(model))
            print(compared(run, config, gpu, is_compiled=args.compiling != "none", progress=told), end="\n\n")
    return 0


def add_compile(parser: Parser) -> None:
    """Add the flags of `jaxserve compile`."""
    add_model(parser)
    add_config_flags(parser, EngineConfig, only=("warmup",))
    parser.add_flag(
        "plan", "-o", "--output", type=pathlib.Path, required=True, metavar="FOLDER", help="the folder to write"
    )


def run_compile(args: argparse.Namespace) -> None:
    """Write a folder of programs."""
    gpu = find_gpu(args.device)
    with model_of(args) as (config, name):
        prepare_jax()
        from jaxserve.planning.ahead import compile_ahead

        config = dataclasses.replace(config, **given(args, ("warmup",)))
        told = functools.partial(_tell, f"compiling for {gpu.kind}:")
        written = compile_ahead(config, gpu, args.output, name=name, progress=told)
    print(
        f"{args.output}: {written.num_executables} programs compiled for {gpu.kind} and {written.num_lowered} lowered, "
        f"{written.num_bytes / 2**20:.1f} MiB, for {written.num_blocks} KV blocks"
    )


@contextlib.contextmanager
def model_of(args: argparse.Namespace) -> Iterator[tuple[EngineConfig, str]]:
    """Open the options, and the name of the model or the shape, whose config.json is in a folder until the end."""
    if (args.model is None) == (args.shape is None):
        raise ConfigError("name a MODEL or a --shape, one of them")
    options = given(args, (*ENGINE_FIELDS, STAGES))
    if args.shape is None:
        yield EngineConfig(model=args.model, **options), args.model
        return
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(pathlib.Path(folder), SHAPES[args.shape])
        yield EngineConfig(model=str(path), **options), f"random weights of the shape {args.shape}"


def prepare_jax() -> None:
    """Choose the CPU, do without XLA's words about a device that it cannot ask, and find jax's CUDA plugin; before
    kernels are imported, since Mosaic looks for its runtime in the plugin while it is imported.

    Nothing is read from jax's compilation cache: an executable of it has no reports, and may not be written again.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # no GPU is needed, and the GPU may be in use
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from pallas_kernels.deviceless import is_available

    is_available()


def _tell(start: str, name: str) -> None:
    print(start, name, file=sys.stderr, flush=True)
