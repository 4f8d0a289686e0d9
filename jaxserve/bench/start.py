"""How long a server takes from its command to the first token, by phase: with an empty cache of programs, then with it.

The phases inside the engine are those of its own log line ("ready after ...").
"""

import json
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from typing import NamedTuple

from jaxserve.bench.report import table
from jaxserve.bench.served import served


class Start(NamedTuple):
    """One start: seconds by phase, in the order in which phases end, and of processor time."""

    phases: dict[str, float]
    processor: float


def run(model: str, *, install: bool) -> str:
    """Start servers of a model and return the table. `install`: first install the clone into a new environment."""
    columns: dict[str, Start] = {}
    with tempfile.TemporaryDirectory() as folder:
        python = sys.executable
        if install:
            venv = pathlib.Path(folder, "venv")
            columns["install"] = _install(venv)
            python = str(venv / "bin" / "python")
        for name in ("empty cache", "warm cache"):
            columns[name] = _start(model, cache=pathlib.Path(folder, "cache"), python=python)
    return _table(columns)


def _install(venv: pathlib.Path) -> Start:
    script = pathlib.Path(__file__).parents[2] / "deploy" / "install.py"
    processor, began = _processor_seconds(), time.monotonic()
    subprocess.run([sys.executable, str(script), str(venv)], check=True)
    return Start({"install": time.monotonic() - began}, _processor_seconds() - processor)


def _start(model: str, *, cache: pathlib.Path, python: str) -> Start:
    processor, began = _processor_seconds(), time.monotonic()
    log = cache.parent / "server.log"
    with served([model, "--compilation-cache-dir", str(cache)], log=log, python=python) as url:
        announced = time.monotonic() - began
        body = json.dumps({"prompt": "Once upon a time", "max_tokens": 1}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request).read()
        first_token = time.monotonic() - began
    found = re.search(r"ready after ([\d.]+) s: (.*)", log.read_text())
    inside = re.findall(r"([a-z ]+) ([\d.]+) s", found[2]) if found else []
    engine = {f"engine: {name.strip()}": float(seconds) for name, seconds in inside}
    before = announced - sum(engine.values())
    phases = {"processes, imports": before, **engine, "server ready": announced, "first token": first_token}
    return Start(phases, _processor_seconds() - processor)


def _processor_seconds() -> float:
    """Return the processor time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _table(columns: dict[str, Start]) -> str:
    names = list(dict.fromkeys(name for start in columns.values() for name in start.phases))
    rows = [(name, *(_seconds(start.phases.get(name)) for start in columns.values())) for name in names]
    rows.append(("processor time, to the end", *(_seconds(start.processor) for start in columns.values())))
    return table(("seconds", *columns), rows)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
