"""Draw docs/steps.svg from docs/benchmarks.json: decode steps beside vLLM's. `python docs/plot_steps.py`."""

import json
import pathlib
import re

import matplotlib
import matplotlib.pyplot as plt

FOLDER = pathlib.Path(__file__).parent
COLORS = {"jaxserve": "#0b7285", "vLLM": "#ced4da"}


def main() -> None:
    """Write the plot: a panel for each format of weights, a pair of bars for each batch."""
    matplotlib.rcParams.update({"font.size": 9, "svg.hashsalt": "steps", "svg.fonttype": "none"})
    figures = json.loads((FOLDER / "benchmarks.json").read_text())
    rows = figures["rows"]
    formats = [name for name, value in figures.items() if isinstance(value, dict)]
    figure, panels = plt.subplots(1, len(formats), figsize=(9, 2.6), sharey=True, layout="constrained")
    for panel, name in zip(panels, formats, strict=True):
        for offset, engine in ((-0.2, "jaxserve"), (0.2, "vLLM")):
            for index, value in enumerate(figures[name][engine]):
                if value is not None:
                    panel.bar(index + offset, value, 0.4, color=COLORS[engine], label=engine if index == 0 else None)
                    panel.text(index + offset, value, f"{value:.1f}", ha="center", va="bottom", fontsize=7)
        panel.set_title(name)
        panel.set_xticks(range(len(rows)), rows, fontsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("ms a step")
    panels[0].legend(frameon=False)
    figure.savefig(FOLDER / "steps.svg", metadata={"Date": None})
    picture = (FOLDER / "steps.svg").read_text()
    picture = re.sub(r"\s*<metadata>.*?</metadata>|<!DOCTYPE.*?>", "", picture, flags=re.DOTALL)  # names of hosts
    (FOLDER / "steps.svg").write_text(picture)


if __name__ == "__main__":
    main()
