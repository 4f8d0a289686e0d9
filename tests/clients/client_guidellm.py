"""guidellm: a benchmark of streams, by the command that `make clients` has installed in an environment of its own."""

import json
import os
import pathlib
import subprocess

from conftest import MODEL, PATIENCE, ROOT


def test_a_benchmark(url, tmp_path):
    command = os.environ.get("GUIDELLM", str(ROOT / ".venv-clients/guidellm/bin/guidellm"))
    report = tmp_path / "report.json"
    flags = {
        "--backend": f"kind=openai_http,target={url.removesuffix('/v1')},model={MODEL}",
        "--profile": "kind=concurrent,streams=2",
        "--constraint": "kind=max_requests,count=6",
        "--tokenizer": f"kind=huggingface_auto,model={pathlib.Path(ROOT, 'checkpoints', MODEL)}",
        "--data": "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "--output": f"kind=json,path={report}",
    }
    arguments = [word for flag in flags.items() for word in flag]
    subprocess.run([command, "run", *arguments, "--disable-console"], check=True, capture_output=True, timeout=PATIENCE)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    assert metrics["request_totals"]["successful"] == 6
    assert metrics["request_totals"]["errored"] == 0
    assert metrics["time_to_first_token_ms"]["successful"]["mean"] > 0
