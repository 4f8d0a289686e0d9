"""The table of vLLM's flags in docs/vllm.md: `python -m jaxserve.vllm_page` prints it."""

import sys

from jaxserve import vllm_flags
from jaxserve.cli import flags_of_serve
from jaxserve.vllm_flags import Harmless


def page() -> str:
    """Return the table of flags, as Markdown."""
    same = flags_of_serve()
    rows = ["| flag of `vllm serve` | here |", "|---|---|"]
    table = dict.fromkeys(same, "the same") | {name: f"`{ours}`" for name, ours in vllm_flags.RENAMED.items()}
    for flag, row in vllm_flags.FLAGS.items():
        name = f"{flag}`, `{vllm_flags.SHORT[flag]}" if flag in vllm_flags.SHORT else flag
        if isinstance(row, Harmless) and row.values:
            shown = ", ".join(row.values if len(row.values) < 8 else (row.values[0], "...", row.values[-1]))
            table[name] = f"accepted with {shown}, else not supported: {row.why}"
        elif isinstance(row, Harmless):
            table[name] = f"accepted, nothing is needed: {row.why}"
        else:
            table[name] = f"refused: {row.instead}" if row.instead else "not supported"
    return "\n".join(rows + [f"| `{name}` | {text} |" for name, text in sorted(table.items())]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
