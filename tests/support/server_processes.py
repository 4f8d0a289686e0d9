"""`jaxserve serve` over a scripted engine, as processes, and clients that load it."""

import asyncio
import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import httpx
import psutil
import pytest
from waiting import PATIENCE, wait_until

ROOT = pathlib.Path(__file__).parents[2]


class Serving:
    """A running server of several processes, its sockets in a folder of its own."""

    def __init__(self, model, *flags, folder=None):
        self.temporary = tempfile.TemporaryDirectory(prefix="js", dir=folder)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fake_serve", str(model), "--port", "0", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support"), "TMPDIR": self.temporary.name},
            cwd=ROOT,
        )
        self.log = []

    def read_log_until(self, pattern):
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(pattern, line):
                return found
        pytest.fail(f"{pattern} is not in the log:\n" + "".join(self.log))

    def wait_until_serving(self):
        self.url = self.read_log_until(r"serving .* at (http://\S+)/v1")[1]
        self.children = psutil.Process(self.process.pid).children(recursive=True)
        return self

    def wait_for_children(self, number):
        def are_there():
            parent = psutil.Process(self.process.pid)
            self.children = parent.children(recursive=True)
            return len(parent.children()) == number  # workers have children of their own

        wait_until(are_there)

    def child(self, module):
        (found,) = [child for child in self.children if any(part.endswith(module) for part in child.cmdline())]
        return found

    @property
    def workers(self):
        return [child for child in self.children if "jaxserve.server.process.worker" in child.cmdline()]

    @property
    def engines(self):
        return [child for child in self.children if "fake_serve" in child.cmdline()]

    @property
    def engine(self):
        (engine,) = self.engines
        return engine

    @property
    def folder(self):
        (folder,) = pathlib.Path(self.temporary.name).iterdir()
        return folder

    def port(self):
        sockets = psutil.Process(self.process.pid).net_connections()
        (port,) = {each.laddr.port for each in sockets if each.status == "LISTEN"}
        return port

    def wait(self):
        """Return the exit code, once nothing of the server remains."""
        code = self.process.wait(timeout=PATIENCE)
        _, alive = psutil.wait_procs(getattr(self, "children", []), timeout=PATIENCE)
        assert not alive
        wait_until(lambda: not os.listdir(self.temporary.name))  # the last one to leave removes it
        return code

    def rest_of_log(self):
        return "".join(self.log) + self.process.stderr.read()

    def close(self):
        for child in getattr(self, "children", []):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.process.kill()
        self.process.communicate()
        self.temporary.cleanup()


async def stream(client, url, *, prompt="a", max_tokens, on_first=None, stream=True):
    """Send one request; return its status, its text, and the error it ended with, if any."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": stream}
    text, error = "", None
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if not stream or response.status_code != 200:
            await response.aread()
            return response.status_code, "", response
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                error = event.get("error", error)
                text += event["choices"][0]["text"] if "choices" in event else ""
                if on_first is not None:
                    on_first.set()
    return response.status_code, text, error


def client():
    return httpx.AsyncClient(timeout=PATIENCE, verify=False, limits=httpx.Limits(max_connections=200))


async def load(http, url, number, **options):
    """Send `number` requests at once, and return their tasks when all have begun."""
    begun = [asyncio.Event() for _ in range(number)]
    tasks = [asyncio.create_task(stream(http, url, on_first=event, **options)) for event in begun]
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), PATIENCE)
    return tasks


async def metric(http, url, name):
    text = (await http.get(f"{url}/metrics")).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"jaxserve:{name}"))
