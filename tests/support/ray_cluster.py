"""The Ray Serve application on a Ray of this machine: `python -m ray_cluster PORT OPTIONS`, with options as JSON.

In a process of its own, as Ray leaves threads and warnings behind. It answers "ready" when requests are served, then
for each line of its input "killed", when it has killed a replica, and ends Ray at the end of its input.
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


def _kill_a_replica():
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    replicas = [name for name in names if name.startswith("SERVE_REPLICA::") and "#engine#" in name]
    ray.kill(ray.get_actor(replicas[0], namespace="serve"))


def _answer(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(port, options):
    application = ray_serve.app(options)
    folder = tempfile.mkdtemp(prefix="ray-")
    try:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=OBJECT_STORE_MEMORY,
            _node_ip_address=LOCALHOST,
            _temp_dir=folder,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}},
        )
        serve.start(http_options={"host": LOCALHOST, "port": port})
        serve.run(application)
        _answer("ready")
        for _ in sys.stdin:
            _kill_a_replica()
            _answer("killed")
        serve.shutdown()
        ray.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
