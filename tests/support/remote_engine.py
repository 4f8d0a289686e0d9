"""A scripted engine and its side of the wire, and what clients of it send and receive."""

import asyncio
import contextlib
import pathlib
import shutil
import tempfile
import threading

from fake_client import FakeEngineClient, Script
from waiting import PATIENCE

from jaxserve.engine.process import EngineServer
from jaxserve.engine.remote import RemoteEngineClient
from jaxserve.request import EngineRequest
from jaxserve.sampling_params import SamplingParams


class Engine:
    """A scripted engine and its side of the wire, in threads."""

    def __init__(self, **options):
        self.play = lambda request: Script(token_ids=request.prompt_token_ids[: request.max_tokens])
        self.client = FakeEngineClient(lambda request: self.play(request), **options)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="js"))  # short, as the path of a Unix socket must be
        self.server = EngineServer(self.client, self.folder)
        self.was_alive = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        self.was_alive = self.server.run()

    def close(self):
        self.server.stop()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        shutil.rmtree(self.folder)


def request(name="a", prompt=(5, 6, 7, 8), max_tokens=4, **params):
    return EngineRequest(
        request_id=name,
        group_id=name,
        prompt_token_ids=list(prompt),
        params=SamplingParams(**params),
        max_tokens=max_tokens,
    )


@contextlib.asynccontextmanager
async def connected(engine, *names):
    clients = [await asyncio.wait_for(RemoteEngineClient.connect(engine.folder, name), PATIENCE) for name in names]
    try:
        yield clients
    finally:
        for client in clients:
            client.close()


class Sink:
    def __init__(self):
        self.batches = []

    def __call__(self, outputs):
        self.batches.append(outputs)

    @property
    def outputs(self):
        return [output for batch in self.batches for output in batch]

    @property
    def reasons(self):
        return {output.request_id: output.finish_reason for output in self.outputs if output.finish_reason}

    def tokens(self, name):
        return [token for output in self.outputs if output.request_id == name for token in output.new_token_ids]
