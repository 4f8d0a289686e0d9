"""The flags in docs/vllm.md: `python -m jaxserve.vllm_page` prints them."""

import sys

from jaxserve import vllm_flags
from jaxserve.cli import flags_of_serve
from jaxserve.vllm_flags import Harmless


def page() -> str:
    """Return what becomes of each flag of vLLM, and the flags that vLLM does not have, as Markdown."""
    ours = {flag: text for flag, text in flags_of_serve().items() if not flag.startswith("--no-")}
    same = ", ".join(f"`{flag}`" for flag in ours if flag not in vllm_flags.ONLY_OURS)
    table = {name: f"`{flag}`" for name, flag in vllm_flags.RENAMED.items()}
    for flag, row in vllm_flags.FLAGS.items():
        name = f"{flag}`, `{vllm_flags.SHORT[flag]}" if flag in vllm_flags.SHORT else flag
        if isinstance(row, Harmless) and row.values:
            shown = ", ".join(row.values if len(row.values) < 8 else (row.values[0], "...", row.values[-1]))
            table[name] = f"accepted with {shown}, else not supported: {row.why}"
        elif isinstance(row, Harmless):
            table[name] = f"accepted, nothing is needed: {row.why}"
        else:
            table[name] = f"refused: {row.instead}" if row.instead else "not supported"
    others = "".join(f"| `{name}` | {text} |\n" for name, text in sorted(table.items()))
    only = "".join(f"| `{flag}` | {ours[flag].replace('|', '/')} |\n" for flag in vllm_flags.ONLY_OURS)
    return (
        f"The same in both: {same}.\n\n| other flags of `vllm serve` | here |\n|---|---|\n{others}\n"
        f"| flags that vLLM does not have | meaning |\n|---|---|\n{only}"
    )


if __name__ == "__main__":
    sys.stdout.write(page())
