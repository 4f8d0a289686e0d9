"""aiperf: a load of streams, by the command that `make clients` has installed in an environment of its own."""

import json
import os
import pathlib
import subprocess

from conftest import MODEL, PATIENCE, ROOT


def test_a_profile(url, tmp_path):
    command = os.environ.get("AIPERF", str(ROOT / ".venv-clients/aiperf/bin/aiperf"))
    flags = {
        "--model": MODEL,
        "--url": url.removesuffix("/v1"),
        "--endpoint-type": "chat",
        "--tokenizer": str(pathlib.Path(ROOT, "checkpoints", MODEL)),
        "--request-count": "6",
        "--concurrency": "2",
        "--isl": "16",
        "--osl": "8",
        "--artifact-dir": str(tmp_path),
        "--ui": "simple",
    }
    arguments = [word for flag in flags.items() for word in flag]
    subprocess.run([command, "profile", "--streaming", *arguments], check=True, capture_output=True, timeout=PATIENCE)
    profile = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert profile["request_count"]["avg"] == 6
    assert profile["time_to_first_token"]["avg"] > 0
