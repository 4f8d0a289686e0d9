"""openai-node: the package that `make clients` has put into .venv-clients/node, run by node."""

import json
import os
import pathlib
import subprocess

from conftest import MODEL, PATIENCE, ROOT


def test_openai_node(url):
    script = pathlib.Path(__file__).with_name("openai_node.cjs")
    modules = os.environ.get("NODE_PATH", str(ROOT / ".venv-clients/node/node_modules"))
    run = subprocess.run(
        ["node", script, url, MODEL],
        env={**os.environ, "NODE_PATH": modules},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["models"] == [MODEL]
    assert result["whole"] == result["streamed"] != ""
    assert result["call"]["name"] == "sail"
    assert json.loads(result["call"]["arguments"])["to"] in ("north", "south")
    assert isinstance(result["response"], str)
    assert result["events"][0] == "response.created"
    assert result["events"][-1] == "response.incomplete"
    assert result["embeddings"] == [192, 192]
    assert result["left"]
    assert result["error"] == ["BadRequestError", 400, "temperature"]
