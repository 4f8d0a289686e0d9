"""The options in docs/api.md: `python -m jaxserve.options_page` prints them."""

import dataclasses
import inspect
import sys
from collections.abc import Iterable

import msgspec

from jaxserve.config import EngineConfig
from jaxserve.local_model import LocalModel
from jaxserve.sampling_params import PARAMETERS, SamplingParams


def page() -> str:
    """Return what each option of LLM and each field of SamplingParams means, as Markdown."""
    given = inspect.signature(LocalModel).parameters
    engine = (
        (field.name, given[field.name].default, field.metadata["help"]) for field in dataclasses.fields(EngineConfig)
    )
    sampling = (
        (field.name, field.default, PARAMETERS[field.name].meaning) for field in msgspec.structs.fields(SamplingParams)
    )
    return f"## Options of LLM\n\n{_table(engine)}\n## Fields of SamplingParams\n\n{_table(sampling)}"


def _table(rows: Iterable[tuple[str, object, str]]) -> str:
    cells = (f"| `{name}` | `{default!r}` | {text.replace('|', '/')} |\n" for name, default, text in rows)
    return f"| name | default | meaning |\n|---|---|---|\n{''.join(cells)}"


if __name__ == "__main__":
    sys.stdout.write(page())
