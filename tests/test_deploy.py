"""Files for containers and clusters, checked as far as that goes without a daemon."""

import json
import pathlib
import subprocess
import sys

import yaml
from dockerfile_parse import DockerfileParser

from jaxserve import cli

ROOT = pathlib.Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"


def instructions(name):
    """The arguments of all instructions of that name in the Dockerfile."""
    structure = DockerfileParser(path=str(DEPLOY / "Dockerfile")).structure
    return [each["value"] for each in structure if each["instruction"] == name]


def flags_are_known(arguments):
    return cli._parser().parse_known_args(["serve", *arguments])[1] == []


def test_the_image_runs_without_privileges_and_hears_signals():
    assert instructions("USER")[-1] == "10001"
    assert all(":" in base and not base.endswith(":latest") for base in instructions("FROM"))
    (entry,) = instructions("ENTRYPOINT")
    program, command, *arguments = json.loads(entry)  # a shell would not hand on SIGTERM
    assert (program, command) == ("jaxserve", "serve")
    assert flags_are_known(["MODEL", *arguments])


def test_what_the_image_copies_is_there_and_not_ignored():
    kept = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    sources = [source for copy in instructions("COPY") if "--from" not in copy for source in copy.split()[:-1]]
    assert set(sources) == kept
    assert all((ROOT / source).exists() for source in sources)


def test_kubernetes_accepts_the_manifest():
    check = [sys.executable, "-m", "kubernetes_validate", "--strict", "--quiet", str(DEPLOY / "kubernetes.yaml")]
    result = subprocess.run(check, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_pod_is_probed_and_drained():
    manifests = {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {probe: container[probe]["httpGet"]["path"] for probe in container if probe.endswith("Probe")} == {
        "startupProbe": "/health",
        "readinessProbe": "/health",
        "livenessProbe": "/live",
    }
    assert flags_are_known(container["args"])
    arguments = container["args"]
    drain = int(arguments[arguments.index("--shutdown-timeout") + 1])
    (_, pause) = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] > drain + int(pause)
    assert manifests["Service"]["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]


def test_compose_builds_the_image():
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["jaxserve"]
    context = (DEPLOY / service["build"]["context"]).resolve()
    assert context == ROOT
    assert (context / service["build"]["dockerfile"]).exists()
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
