"""`python -m jaxserve.planning.budgets`: latencies and goodput by token budget, on a simulated server.

Requests arrive at shares of one capacity, that of the largest budget, so that all budgets get the same requests at the
same times.
"""

import argparse
import dataclasses
import functools
import itertools
import pathlib
import sys
from collections.abc import Sequence

from jaxserve.arguments import Parser
from jaxserve.bench.flags import add_flag, add_number, at_least, positive
from jaxserve.errors import JaxserveError
from jaxserve.planning.commands import add_model, model_of, prepare_jax

HEADER = ("arrivals", "load", "budget", "TTFT p50", "p90", "p99", "ITL p50", "p90", "p99")

NUM_FULL, ROUNDS = 1000, 3
"""Requests with which the capacity is measured, at least, and times as many as run at once."""


def main(arguments: Sequence[str]) -> None:
    """Print a row for each kind of arrivals, load and budget."""
    description = "latencies and goodput by token budget, on a simulated server"
    parser = Parser(prog="python -m jaxserve.planning.budgets", usage="[options]", description=description)
    add_model(parser)
    add = functools.partial(add_flag, parser)
    budgets = (512, 1024, 2048, 4096, 8192)
    add("--budgets", type=at_least(1), nargs="+", default=budgets, metavar="N", help="default: 512 to 8192")
    add("--targets", type=positive, nargs="*", default=(), metavar="MS", help="also budgets for steps of this time")
    add("--patience", type=positive, default=100.0, metavar="MS", help="how long prompts wait for them; default: 100")
    add("--loads", type=positive, nargs="+", default=(0.25, 0.5, 0.75, 0.9), metavar="X", help="of the capacity")
    levels = ("ttft:200,tpot:25", "ttft:1000,tpot:50")
    add("--levels", nargs="+", default=levels, metavar="NAME:MS,...", help="service levels, as of bench load-curve")
    add("--traces", type=pathlib.Path, nargs="*", default=(), metavar="FILE", help="in Azure's format")
    add_number(parser, "--seconds", 20, "in which requests arrive, of each run")
    add_number(parser, "--input-len", 1024, "mean tokens of random prompts")
    add_number(parser, "--output-len", 256, "mean tokens of their answers")
    args, unknown = parser.parse_known_args(arguments)
    parser.check(unknown, [])
    prepare_jax()
    try:
        _run(args)
    except JaxserveError as error:
        parser.error(str(error))


def _run(args: argparse.Namespace) -> None:
    from jaxserve.bench.report import table
    from jaxserve.bench.serving.arrivals import arrival_times
    from jaxserve.bench.serving.curve import BURSTINESS
    from jaxserve.bench.serving.options import ServingOptions
    from jaxserve.bench.serving.summary import parse_slos, summarize
    from jaxserve.bench.serving.workloads import azure_calls, fit, random_calls
    from jaxserve.gpus import find_gpu
    from jaxserve.planning.simulation import StepTimes, adaptive, capacity, fixed, limits_of, simulate
    from jaxserve.planning.sizes import declare

    levels = [parse_slos(level.split(",")) for level in args.levels]
    with model_of(args) as (config, _):
        engines = {
            budget: declare(
                dataclasses.replace(config, max_num_batched_tokens=budget), find_gpu(args.device), to_compile=False
            )
            for budget in args.budgets
        }
    times = {budget: StepTimes(engine) for budget, engine in engines.items()}
    limits = {budget: limits_of(engine) for budget, engine in engines.items()}
    largest, patience = max(args.budgets), args.patience / 1e3
    designs = {str(budget): (budget, fixed(budget)) for budget in args.budgets}
    for target in args.targets:
        by_time = functools.partial(adaptive, times[largest], largest, target=target / 1e3)
        designs[f"{target:g} ms"] = largest, by_time()
        designs[f"{target:g} ms, waits {args.patience:g}"] = largest, by_time(patience=patience)

    options = ServingOptions(
        num_requests=100_000, input_len=args.input_len, output_len=args.output_len, range_ratio=0.5
    )
    workloads = [(name, random_calls(options), burstiness) for name, burstiness in BURSTINESS.items()]
    workloads += [(path.stem, azure_calls(path), None) for path in args.traces]
    rows = []
    for name, calls, burstiness in workloads:
        calls = [fit(call, limits[largest].max_model_len, None) for call in calls]
        num_calls = max(NUM_FULL, ROUNDS * limits[largest].max_num_seqs)
        full = capacity(times[largest], limits[largest], calls[:num_calls])
        print(f"capacity, {name}: {full:.2f} requests/s", flush=True)
        for load, (design, (budget, chosen)) in itertools.product(args.loads, designs.items()):
            rate = load * full
            some = calls[: max(2, round(rate * args.seconds))]
            if burstiness is None:  # a trace keeps its pattern, and is played faster or slower
                scale = len(some) / rate / (some[-1].arrival or 1.0)
                arrivals = [scale * (call.arrival or 0.0) for call in some]
            else:
                arrivals = arrival_times(some, rate=rate, burstiness=burstiness, seed=0)
            result = simulate(times[budget], limits[budget], some, arrivals, chosen)
            found = summarize(result, slos={}).latencies
            goods = [summarize(result, slos=slos).goodput for slos in levels]
            spread = [(each.p50, each.p90, each.p99) for each in (found["ttft"], found["itl"])]
            figures = [f"{value:.1f}" for value in itertools.chain(*spread)]
            rows.append([name, f"{load:g}", design, *figures, *(f"{good.share:.1%}" for good in goods if good)])
            print(*rows[-1], file=sys.stderr, flush=True)
    print("", table([*HEADER, *args.levels], rows), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
