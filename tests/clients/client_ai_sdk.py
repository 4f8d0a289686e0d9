"""@ai-sdk/openai-compatible and @ai-sdk/openai in its default mode, responses: run by node."""

import json
import os
import pathlib
import subprocess

from conftest import MODEL, PATIENCE, ROOT


def test_ai_sdk(url):
    script = pathlib.Path(__file__).with_name("ai_sdk.cjs")
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
    for provider in ("compatible", "openai"):
        found = result[provider]
        assert found["whole"] == found["streamed"] != ""
        assert found["second"], "an answer to a conversation that has the first one"
        assert found["object"]["masts"] in range(1, 6)
        assert found["call"]["toolName"] == "sail"
        assert found["call"]["input"]["to"] in ("north", "south")
