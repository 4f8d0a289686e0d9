"""The Ray Serve application on a Ray of this machine: `python -m ray_cluster PORT OPTIONS RECORD`; options are JSON.

In a process of its own, as Ray leaves threads and warnings behind. It answers "ready" when requests are served, then
for each line of its input "killed" and the replica, when it has killed one, and ends Ray at the end of its input.
RECORD gets a line for each request that reaches a replica: its X-Request-Id, and the replica.
"""

import json
import os
import shutil
import sys
import tempfile

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # all of Ray listens at 127.0.0.1 then

import ray
from ray import serve

from jaxserve import ray_serve

LOCALHOST = "127.0.0.1"
OBJECT_STORE_MEMORY = 2**27
"""Bytes. By default it is a third of the memory of the machine."""


class _RecordingEngine(ray_serve.Engine):
    async def answer(self, prompt, scope, body):
        ids = [value.decode() for name, value in scope["headers"] if name == b"x-request-id"]
        with open(os.environ["RECORD"], "a") as record:
            record.write(f"{ids[0]} {serve.get_replica_context().replica_id.unique_id}\n")
        async for message in super().answer(prompt, scope, body):
            yield message


def _kill_a_replica():
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    replicas = [name for name in names if name.startswith("SERVE_REPLICA::") and "#engine#" in name]
    ray.kill(ray.get_actor(replicas[0], namespace="serve"))
    return replicas[0].rsplit("#", 1)[1]


def _answer(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(port, options, record):
    ray_serve.Engine = _RecordingEngine
    application = ray_serve.app(options)
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu", "RECORD": record}
    folder = tempfile.mkdtemp(prefix="ray-")
    try:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=OBJECT_STORE_MEMORY,
            _node_ip_address=LOCALHOST,
            _temp_dir=folder,
            runtime_env={"env_vars": environment},
        )
        serve.start(http_options={"host": LOCALHOST, "port": port})
        serve.run(application)
        _answer("ready")
        for _ in sys.stdin:
            _answer(f"killed {_kill_a_replica()}")
        serve.shutdown()
        ray.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])
