"""The plots of a load in one PNG: the latency of each request, and the server's throughput over time."""

import pathlib

import numpy as np

from jaxserve.bench.serving.load import LoadResult
from jaxserve.bench.serving.summary import concurrency, times
from jaxserve.errors import InvalidRequest

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
