"""The plots of a load in one PNG: the latency of each request, and the server's throughput over time."""

import pathlib
import re
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.bench.serving.load import LoadResult
from jaxserve.bench.serving.summary import concurrency, times
from jaxserve.errors import InvalidRequest

if TYPE_CHECKING:
    from jaxserve.bench.serving.curve import Curve

_INK, _SOFT, _ALERT = "#1f4e79", "#c8792b", "#b3261e"


def save_plots(result: LoadResult, path: pathlib.Path, *, title: str) -> None:
    """Plot times to first token, latency distributions, output rate and concurrency as four panels.

    Raises InvalidRequest if matplotlib is not installed or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidRequest("plots need matplotlib: pip install jaxserve[bench]", param="save_plot") from error

    whole = [outcome for outcome in result.outcomes if outcome.kind is None]
    failed = [outcome for outcome in result.outcomes if outcome.kind is not None]
    measured = [times(outcome) for outcome in whole]
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    ((first, spread), (rate, running)) = figure.subplots(2, 2)
    figure.suptitle(title, fontsize=11)

    ttfts = [one.ttft for one in measured]
    first.plot([one.sent - result.start for one in whole], ttfts, ".", color=_INK, markersize=3, alpha=0.6)
    if failed:
        sent = [outcome.sent - result.start for outcome in failed]
        first.plot(sent, [0.0] * len(sent), "|", color=_ALERT, markersize=10, label="failed")
        first.legend(frameon=False)
    first.set(title="Time to first token", xlabel="sent after, s", ylabel="ms")

    tpots = [one.tpot for one in measured if one.tpot is not None]
    gaps = [gap for one in measured for gap in one.itl]
    curves = (("first token", ttfts, _INK), ("per output token", tpots, _SOFT), ("between chunks", gaps, "#6b7f5a"))
    for name, values, color in curves:
        if values:
            quantiles = np.linspace(0, 1, min(len(values), 1000))
            spread.plot(np.quantile(values, quantiles), quantiles, color=color, label=name)
            spread.legend(frameon=False, loc="lower right")
    spread.set(title="Share of requests (chunks) within", xlabel="ms", ylim=(0, 1.02))
    if any(value > 0 for _, values, _ in curves for value in values):
        spread.set_xscale("log")
        spread.set_xlim(left=0.1)  # smaller gaps are chunks that arrived together

    arrivals = np.array([time - result.start for one in whole for time in one.chunk_times])
    if len(arrivals):
        width = max(1.0, arrivals.max() / 200)
        counts, edges = np.histogram(arrivals, bins=np.arange(0, arrivals.max() + 2 * width, width))
        num_tokens = sum(one.num_output_tokens for one in whole)
        rate.stairs(counts / width * num_tokens / len(arrivals), edges, color=_INK, fill=True, alpha=0.8)
    rate.set(title="Output tokens a second", xlabel="s", ylim=(0, None))

    steps = concurrency(result.outcomes)
    running.step([time - result.start for time, _ in steps], [n for _, n in steps], where="post", color=_INK)
    running.set(title="Requests at once", xlabel="s", ylim=(0, None))
    for axes in (first, spread, rate, running):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    try:
        figure.savefig(path, dpi=110, format="png")
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error}", param="save_plot") from error


def save_curve(curve: "Curve", path: pathlib.Path) -> None:
    """Plot times to first token, times between tokens and goodput over the load, as SVG: a line a percentile, a panel
    a kind of arrivals and metric.

    Raises InvalidRequest as `save_plots` does.
    """
    try:
        import matplotlib
        from matplotlib import ticker
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidRequest("plots need matplotlib: pip install jaxserve[bench]", param="save_plot") from error
    kinds = list(dict.fromkeys(point.arrivals for point in curve.points))
    figure = Figure(figsize=(9, 1.9 * len(kinds)), layout="constrained")
    panels = figure.subplots(len(kinds), 3, sharex=True, sharey="col", squeeze=False)
    for row, kind in zip(panels, kinds, strict=True):
        points = [point for point in curve.points if point.arrivals == kind]
        loads = [point.load for point in points]
        for axes, metric in zip(row, ("ttft", "itl"), strict=False):
            for name, color in (("p50", _INK), ("p90", _SOFT), ("p99", _ALERT)):
                values = [getattr(point.summary.latencies.get(metric), name, np.nan) for point in points]
                axes.plot(loads, values, ".-", color=color, label=name)
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
        for index, color in zip(range(len(points[0].goodputs)), (_INK, _SOFT, _ALERT), strict=False):
            slos = points[0].goodputs[index].slos
            label = ", ".join(f"{name} {limit:g} ms" for name, limit in slos.items())
            row[2].plot(loads, [100 * point.goodputs[index].share for point in points], ".-", color=color, label=label)
        row[0].set_ylabel(kind)
        row[2].set_ylim(0, 103)
    for axes, title in zip(panels[0], ("first token, ms", "between tokens, ms", "good requests, %"), strict=True):
        axes.set_title(title)
        axes.legend(frameon=False, fontsize=7, loc="lower left" if "good" in title else "upper left")
    for axes in panels[-1]:
        axes.set_xlabel("rate / capacity")
        axes.set_xticks(sorted({point.load for point in curve.points}))
    for axes in panels.flat:
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    try:
        with matplotlib.rc_context(
            {"svg.hashsalt": "load", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}
        ):
            figure.savefig(path, format="svg", metadata={"Date": None})
        picture = re.sub(r"\s*<metadata>.*?</metadata>|<!DOCTYPE.*?>", "", path.read_text(), flags=re.DOTALL)
        picture = re.sub(r"(\.\d\d)\d+", r"\1", picture)  # a hundredth of a point is enough
        path.write_text(picture)
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error}", param="save_plot") from error
