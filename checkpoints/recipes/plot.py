"""Draw the learning curve of a model from the curve.csv files of its stages, in order, and join them into one."""

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    """Write curve.csv and curve.png."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("curves", type=Path, nargs="+", help="curve.csv of each stage")
    parser.add_argument("--title", required=True)
    parser.add_argument("--out", type=Path, required=True, help="the model's folder")
    args = parser.parse_args()
    rows, before = [], 0
    for path in args.curves:
        with open(path, newline="") as f:
            stage = [row | {"tokens": before + int(row["tokens"])} for row in csv.DictReader(f)]
        rows += stage
        before = stage[-1]["tokens"]
    with open(args.out / "curve.csv", "w", newline="") as f:
        writer = csv.DictWriter(f, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    tokens = [row["tokens"] / 1e6 for row in rows]
    axes.plot(tokens, [float(row["heldout_bpb"]) for row in rows], marker=".", label="held-out books, bits per byte")
    axes.set(xlabel="tokens read, millions", ylabel="bits per byte", title=args.title)
    axes.grid(alpha=0.3)
    chats = axes.twinx()
    chats.plot(tokens, [float(row["chat_nats"]) for row in rows], color="tab:orange", marker=".")
    chats.set_ylabel("held-out chats, nats per token", color="tab:orange")
    axes.legend(loc="upper center")
    figure.savefig(args.out / "curve.png", dpi=100)


if __name__ == "__main__":
    main()
