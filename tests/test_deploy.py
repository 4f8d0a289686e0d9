"""Files for containers and clusters, checked as far as that goes without a daemon, and mistakes that checks find."""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

import pytest
import yaml
from depths import quick_first
from dockerfile_parse import DockerfileParser

import jaxserve
from jaxserve import cli

ROOT = pathlib.Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
INSTRUCTIONS = {
    *("FROM", "RUN", "CMD", "LABEL", "EXPOSE", "ENV", "COPY", "ENTRYPOINT", "VOLUME", "USER", "WORKDIR", "ARG"),
}
INSTRUCTIONS |= {"STOPSIGNAL", "HEALTHCHECK"}


def are_known(arguments):
    """True if `jaxserve serve` takes these arguments."""
    try:
        return cli._parser().parse_known_args(["serve", *arguments])[1] == []
    except SystemExit:
        return False


def faults_of_dockerfile(text):
    """What is wrong with a Dockerfile, in words."""
    with tempfile.TemporaryDirectory() as folder:
        parser = DockerfileParser(path=folder)
        parser.content = text
        structure = [each for each in parser.structure if each["instruction"] != "COMMENT"]

    def values(name):
        return [each["value"] for each in structure if each["instruction"] == name]

    faults = [f"no instruction {each['instruction']}" for each in structure if each["instruction"] not in INSTRUCTIONS]
    stages = {words[2] for base in values("FROM") if len(words := base.split()) == 3}
    default = dict(value.split("=") for value in values("ARG") if "=" in value)
    for base in values("FROM"):
        name = re.sub(r"\$\{(\w+)\}", lambda found: default.get(found[1], ""), base.split()[0])
        if name not in stages and (":" not in name or name.endswith(":latest")):
            faults.append(f"{base} is not pinned")
    if values("USER")[-1:] != ["10001"]:
        faults.append("it does not end as a user without privileges")
    try:
        program, command, *arguments = json.loads(values("ENTRYPOINT")[-1])
        if (program, command) != ("jaxserve", "serve") or not are_known(["MODEL", *arguments]):
            faults.append("it does not start a server")
    except (IndexError, ValueError):
        faults.append("a shell does not hand on SIGTERM")
    kept = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    for copy in values("COPY"):
        *sources, _ = copy.split()
        if sources[0].startswith("--from="):
            if sources[0].removeprefix("--from=") not in stages:
                faults.append(f"there is no stage {sources[0]}")
            continue
        faults += [f"{each} is ignored" for each in sources if each not in kept]
        faults += [f"there is no {each}" for each in sources if not (ROOT / each).exists()]
    for run in values("RUN"):
        if "apt-get install" in run and not ("--yes" in run and "rm -rf /var/lib/apt/lists" in run):
            faults.append("apt-get asks, or leaves its lists")
        if "pip install" in run and "-c constraints.txt" not in run:
            faults.append("versions are not pinned")
    health = [value.split("CMD", 1)[1] for value in values("HEALTHCHECK")]
    if not any("/health" in value and json.loads(value) for value in health):
        faults.append("nobody asks for its health")
    return faults


def faults_of_compose(text):
    """What is wrong with a compose file, in words."""
    try:
        service = yaml.safe_load(text)["services"]["jaxserve"]
    except (yaml.YAMLError, KeyError, TypeError) as error:
        return [f"no service: {error}"]
    faults = []
    context = (DEPLOY / service["build"]["context"]).resolve()
    if context != ROOT or not (context / service["build"]["dockerfile"]).exists():
        faults.append("the image is not built from the clone")
    faults += [f"{port} is open to others" for port in service["ports"] if not port.startswith("127.0.0.1:")]
    if not are_known([re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in service["command"]]):
        faults.append("the command is unknown")
    # An empty key is refused by the server; a name without a value is passed on only if it is set.
    faults += [f"{name} is set though it is not" for name, value in service["environment"].items() if value is not None]
    if "gpu" not in service["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"]:
        faults.append("no GPU is reserved")
    return faults


def faults_of_manifest(text):
    """What is wrong with a Kubernetes manifest, in words."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        check = [sys.executable, "-m", "kubernetes_validate", "--strict", "--quiet", file.name]
        result = subprocess.run(check, capture_output=True, text=True, check=False)
    if result.returncode:
        return [result.stdout + result.stderr]
    manifests = {each["kind"]: each for each in yaml.safe_load_all(text)}
    pod, faults = manifests["Deployment"]["spec"]["template"]["spec"], []
    (container,) = pod["containers"]
    probes = {probe: container[probe]["httpGet"] for probe in container if probe.endswith("Probe")}
    if {name: probe["path"] for name, probe in probes.items()} != {
        "startupProbe": "/health",
        "readinessProbe": "/health",
        "livenessProbe": "/live",
    }:
        faults.append("the probes are others")
    ports = {port["name"] for port in container["ports"]}
    if not {probe["port"] for probe in probes.values()} <= ports:
        faults.append("a probe asks at another port")
    arguments = container["args"]
    if not are_known(arguments):
        faults.append("the arguments are unknown")
    elif "--shutdown-timeout" in arguments:
        drain = int(arguments[arguments.index("--shutdown-timeout") + 1])
        (_, pause) = container["lifecycle"]["preStop"]["exec"]["command"]
        if pod["terminationGracePeriodSeconds"] <= drain + int(pause):
            faults.append("requests are killed while they may finish")
    if manifests["Service"]["spec"]["ports"][0]["targetPort"] not in ports:
        faults.append("the service has another port")
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for selector in (
        manifests["Deployment"]["spec"]["selector"]["matchLabels"],
        manifests["Service"]["spec"]["selector"],
    ):
        if not selector.items() <= labels.items():
            faults.append("a selector finds no pod")
    name = manifests["Service"]["metadata"]["name"]
    if name == "jaxserve" and pod.get("enableServiceLinks") is not False:
        faults.append("Kubernetes sets JAXSERVE_PORT for this service")
    secure = {**pod["securityContext"], **container["securityContext"]}
    if not secure.get("runAsNonRoot") or secure.get("allowPrivilegeEscalation") is not False:
        faults.append("it has privileges")
    mounts, volumes = {each["name"] for each in container["volumeMounts"]}, {each["name"] for each in pod["volumes"]}
    if mounts != volumes:
        faults.append("volumes are not those that are mounted")
    return faults


def faults_of_pool(text):
    """What is wrong with the pool and the route of a gateway, in words; schemas of Kubernetes lack them."""
    manifests = {each["kind"]: each for each in yaml.safe_load_all(text)}
    pool, route = manifests["InferencePool"], manifests["HTTPRoute"]
    kinds = {kind: each["apiVersion"] for kind, each in manifests.items()}
    if kinds != {"InferencePool": "inference.networking.k8s.io/v1", "HTTPRoute": "gateway.networking.k8s.io/v1"}:
        return ["kinds or versions are others"]
    faults: list[str] = []
    if pool["spec"].keys() != {"selector", "targetPorts", "endpointPickerRef"}:
        return ["the pool has other fields"]
    if pool["spec"]["endpointPickerRef"].get("failureMode") not in ("FailOpen", "FailClose"):
        faults.append("the failure mode is unknown")
    deployment = next(
        yaml_of
        for yaml_of in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
        if yaml_of["kind"] == "Deployment"
    )
    pods = deployment["spec"]["template"]
    if not pool["spec"]["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items():
        faults.append("the selector finds no pod")
    ports = [port["containerPort"] for container in pods["spec"]["containers"] for port in container["ports"]]
    if [port["number"] for port in pool["spec"]["targetPorts"]] != ports:
        faults.append("the pods have another port")
    (rule,) = route["spec"]["rules"]
    group, _ = pool["apiVersion"].split("/")
    if rule["backendRefs"] != [{"group": group, "kind": pool["kind"], "name": pool["metadata"]["name"]}]:
        faults.append("the route leads elsewhere")
    return faults


CHECKS = {
    "inference-pool.yaml": faults_of_pool,
    "Dockerfile": faults_of_dockerfile,
    "compose.yaml": faults_of_compose,
    "kubernetes.yaml": faults_of_manifest,
}


@pytest.mark.parametrize("name", CHECKS)
def test_there_are_no_faults(name):
    assert CHECKS[name]((DEPLOY / name).read_text()) == []


def test_images_have_one_name():
    pages = [
        *(DEPLOY / name for name in CHECKS.keys() - {"inference-pool.yaml"}),
        ROOT / "README.md",
        ROOT / "docs" / "containers.md",
    ]
    named = {page.name: re.findall(r"\bjaxserve:\d+\.[\w.-]+", page.read_text()) for page in pages}
    assert all(named.values()), named
    names = {name.removesuffix("-cpu") for names in named.values() for name in names}
    assert names == {f"jaxserve:{jaxserve.__version__}"}


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    quick_first(
        [
            ("Dockerfile", "USER 10001\n", ""),
            ("Dockerfile", "USER 10001\n", "USER 10001\nUSER root\n"),
            ("Dockerfile", "WORKDIR /src", "WROKDIR /src"),
            ("Dockerfile", "ubuntu:24.04 AS cpu", "ubuntu:latest AS cpu"),
            ("Dockerfile", ":13.0.1-base-ubuntu24.04", ""),
            ("Dockerfile", "ACCELERATOR=cuda13", "ACCELERATOR=cuda14"),
            ("Dockerfile", '["jaxserve", "serve", "--host", "0.0.0.0"]', "jaxserve serve --host 0.0.0.0"),
            ("Dockerfile", '"--host", "0.0.0.0"', '"--hots", "0.0.0.0"'),
            ("Dockerfile", "COPY checkpoints checkpoints", "COPY checkpoint checkpoints"),
            ("Dockerfile", "--from=build", "--from=builder"),
            ("Dockerfile", "-c constraints.txt ", ""),
            ("Dockerfile", "install --yes --no", "install --no"),
            ("Dockerfile", "/health", "/"),
            ("compose.yaml", "127.0.0.1:8000", "8000"),
            ("compose.yaml", "context: ..", "context: ."),
            ("compose.yaml", "JAXSERVE_API_KEY:", "JAXSERVE_API_KEY: ${JAXSERVE_API_KEY:-}"),
            ("compose.yaml", "services:", "service:"),
            ("compose.yaml", "  jaxserve:\n", "  jaxserve\n"),
            ("compose.yaml", '["${MODEL:-scribe-15m}"]', '["${MODEL:-scribe-15m}", "--prot", "1"]'),
            ("compose.yaml", "[gpu]", "[cpu]"),
            (
                "kubernetes.yaml",
                "      port: http\n            periodSeconds: 10",
                "      port: htp\n            periodSeconds: 10",
            ),
            ("inference-pool.yaml", "k8s.io/v1\nkind: InferencePool", "x-k8s.io/v1alpha2\nkind: InferencePool"),
            ("inference-pool.yaml", "targetPorts:\n    - number: 8000", "targetPorts:\n    - number: 80"),
            ("inference-pool.yaml", "      app: jaxserve", "      app: server"),
            ("inference-pool.yaml", "          name: jaxserve", "          name: other"),
            ("inference-pool.yaml", "  targetPorts:\n    - number: 8000", "  targetPortNumber: 8000"),
            ("kubernetes.yaml", "failureThreshold: 360", "failureThreshhold: 360"),
            ("kubernetes.yaml", "replicas: 1", "replicas: one"),
            ("kubernetes.yaml", "path: /live", "path: /health"),
            ("kubernetes.yaml", "terminationGracePeriodSeconds: 60", "terminationGracePeriodSeconds: 30"),
            ("kubernetes.yaml", '"--shutdown-timeout"', '"--shutdown-time"'),
            ("kubernetes.yaml", "      enableServiceLinks: false # Kubernetes would set JAXSERVE_PORT\n", ""),
            ("kubernetes.yaml", "allowPrivilegeEscalation: false", "allowPrivilegeEscalation: true"),
            ("kubernetes.yaml", "targetPort: http", "targetPort: web"),
            ("kubernetes.yaml", "  selector:\n    app: jaxserve", "  selector:\n    app: server"),
            ("kubernetes.yaml", "            - name: scratch\n", "            - name: scratches\n"),
        ],
        5,
    ),
    ids=lambda text: re.sub(r"\W+", "-", text)[:40],
)
def test_a_mistake_is_found(name, right, wrong):
    text = (DEPLOY / name).read_text()
    assert right in text
    assert CHECKS[name](text.replace(right, wrong, 1))
