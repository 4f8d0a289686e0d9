"""A real server, `jaxserve serve scribe-2m`, for all clients."""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
MODEL = "scribe-2m"
PATIENCE = 240.0  # seconds, for what is sure to come however slow the machine
FLAGS = ["--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--tool-call-parser", "hermes"]


@contextlib.contextmanager
def serving(folder, *flags):
    """A server of its own from start to end; yields its base URL."""
    log = folder / "stderr"
    python = os.environ.get("JAXSERVE_PYTHON", ROOT / ".venv/bin/python")
    with log.open("w") as stderr:
        command = [python, "-m", "jaxserve", "serve", MODEL, "--port", "0", *flags]
        process = subprocess.Popen(command, stderr=stderr, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    try:
        while not (found := re.search(r"serving .* at (http://\S+/v1)", log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        yield found[1]
        process.terminate()
        assert process.wait(timeout=PATIENCE) == 0
        assert "Traceback" not in log.read_text(), log.read_text()
    finally:
        process.kill()
        process.wait()


def run_node(script, url):
    """Run a script of this folder against a server; return what it prints, as JSON."""
    modules = os.environ.get("NODE_PATH", str(ROOT / ".venv-clients/node/node_modules"))
    command = ["node", pathlib.Path(__file__).with_name(script), url, MODEL]
    environment = {**os.environ, "NODE_PATH": modules}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="session")
def url(tmp_path_factory):
    """The base URL that clients are given. JAXSERVE_URL names a server that runs already."""
    if given := os.environ.get("JAXSERVE_URL"):
        yield given
        return
    with serving(tmp_path_factory.mktemp("server"), *FLAGS) as url:
        yield url


@pytest.fixture(autouse=True)
def no_key_of_someone_else(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
