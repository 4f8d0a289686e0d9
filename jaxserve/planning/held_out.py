"""`python -m jaxserve.planning.held_out --since DATE`: plans beside measurements that they do not know.

Steps that were measured since that day stand beside what plans say of them by the runs of earlier days alone. It prints
the table of docs/plan.md, and needs no GPU.
"""

import argparse
import contextlib
import datetime
import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jaxserve.arguments import Parser
from jaxserve.gpus import GPUS
from jaxserve.planning.commands import add_plan, model_of, prepare_jax
from jaxserve.planning.measured import MEASURED, Batches, Run

if TYPE_CHECKING:
    from jaxserve.planning.plan import Speed
    from jaxserve.planning.sizes import Absent

HEADER = ("model", "requests x prompt, output", "planned ms", "measured ms", "error", "stated")


def main(arguments: Sequence[str]) -> None:
    """Print a row for each run, and the error, root mean square, of each kind of models."""
    parser = Parser(
        prog="python -m jaxserve.planning.held_out", usage="--since DATE", description="plans beside later measurements"
    )
    parser.add_argument(
        "--since", required=True, type=_day, metavar="DATE", help="the first day of the runs, as YYYY-MM-DD"
    )
    args, unknown = parser.parse_known_args(arguments)
    parser.check(unknown, [])
    prepare_jax()
    from jaxserve.bench.report import table

    earlier = tuple(batches for batches in MEASURED if batches.date < args.since)
    later = [batches for batches in MEASURED if batches not in earlier]
    if not later:
        parser.error(f"--since {args.since}: no run is of that day or later")
    if not {batches.has_experts for batches in later} <= {batches.has_experts for batches in earlier}:
        parser.error(f"--since {args.since}: no run of an earlier day is of such models")
    rows, errors = [], {}
    for batches in later:
        for run, speed in planned(batches, earlier):
            error = speed.step_ms / run.step - 1
            errors.setdefault(_kind(batches), []).append(error)
            name = f"{batches.shape} {batches.options}".partition(" --max-num-seqs")[0]
            size = f"{run.num_rows} x {run.input_len}, {run.output_len}"
            figures = f"{speed.step_ms:.2f}", f"{run.step:.2f}", f"{error:+.0%}", f"{speed.step_error:.0%}"
            rows.append([name, size, *figures])
    print(table(HEADER, rows))
    for kind, found in errors.items():
        print(f"{kind}: {math.sqrt(sum(error**2 for error in found) / len(found)):.1%} of {len(found)} runs")


def planned(batches: Batches, measured: tuple[Batches, ...] = MEASURED) -> Iterator[tuple[Run, "Speed"]]:
    """Yield the runs and what a plan says of each by the `measured` ones."""
    from jaxserve.planning.plan import SizedLoad, speed_of

    with absent_engine(batches) as engine:
        info = engine.info(engine.num_blocks)
        for run in batches.runs:
            load = SizedLoad(input_len=run.input_len, output_len=run.output_len)
            yield run, speed_of(engine, info, load, num_requests=run.num_rows, measured=measured)


@contextlib.contextmanager
def absent_engine(batches: Batches) -> Iterator["Absent"]:
    """Open the engine that was measured, on a GPU that is not there."""
    from jaxserve.planning.sizes import declare

    parser = Parser(prog="plan", usage="", description="")
    add_plan(parser)
    options = ["--shape", batches.shape, "--device", batches.gpu, *batches.options.split()]
    with model_of(parser.parse_args(options)) as (config, _):
        yield declare(config, GPUS[batches.gpu], to_compile=False)


def _day(text: str) -> str:
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a date such as 2026-11-29, got {text!r}") from None


def _kind(batches: Batches) -> str:
    if batches.num_stages > 1:
        return "stages"
    return "layers with states" if batches.has_states else "experts" if batches.has_experts else "others"


if __name__ == "__main__":
    main(sys.argv[1:])
