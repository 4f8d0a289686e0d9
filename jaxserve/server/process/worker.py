"""An API worker: a process that serves HTTP and text, over an engine in another one. Started by `supervisor`.

Workers that start together open when the parent tells them to: a client that sees a healthy server may stop it, and the
parent must know by then that it has started. A worker drains when the parent tells it to, or on a signal; it
ends at once when the parent is gone.
"""

import asyncio
import gc
import pathlib
import socket
import sys
from collections.abc import Callable

import uvloop

from jaxserve import logs
from jaxserve.answers.choosing.served_tokenizer import served_tokenizer
from jaxserve.engine.frontend import Frontend, sampling_defaults
from jaxserve.engine.remote import RemoteEngineClient
from jaxserve.engine.replicas import ReplicatedEngineClient
from jaxserve.engine.subprocesses import Parent, run_child
from jaxserve.server.process import early
from jaxserve.server.process.lifecycle import Server
from jaxserve.server.process.settings import ENGINE_DIED, Settings
from jaxserve.structured.pool import GrammarPool
from jaxserve.tokenizer import Tokenizer

GC_THRESHOLD = 50_000
"""Allocated objects between two garbage collections: a stream's garbage has no cycles, so most collections find
nothing.
"""

ENGINE_ENDED = "its process has ended"


async def _serve(parent: Parent, settings: Settings) -> int:
    listener = socket.socket(fileno=settings.listener)
    if not settings.opens_when_told:
        server, client = await _start(parent, settings, listener)
    else:
        async with early.answering(listener, settings.server) as meanwhile:
            opened = asyncio.Event()
            server, client = await _start(parent, settings, listener, opened)
            parent.answer()
            await opened.wait()
            meanwhile.hand_over(server.answer)
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    code = await server.serve(on_serving=parent.answer)
    client.close()
    return ENGINE_DIED if code else 0


async def _start(
    parent: Parent, settings: Settings, listener: socket.socket, opened: asyncio.Event | None = None
) -> tuple[Server, RemoteEngineClient | ReplicatedEngineClient]:
    """Connect to the engine as soon as it is up, and follow the parent's commands."""
    folder = pathlib.Path(settings.folder)
    grammars = GrammarPool()
    grammars.start()  # its processes are ready when the engine is
    connecting = asyncio.create_task(_connect(settings))
    # Before the engine is up, so that a faulty tokenizer is reported at once.
    tokenizer = await asyncio.to_thread(lambda: served_tokenizer(Tokenizer.load(settings.tokenizer), settings.server))
    defaults = sampling_defaults(settings.model_path)
    client = await connecting
    server = Server(
        Frontend(client, tokenizer, default_sampling=defaults, seed=settings.seed, grammars=grammars),
        settings.server,
        listener=listener,
        metrics_file=pathlib.Path(settings.metrics_file),
        responses_file=folder / "responses.sqlite",
        worker=settings.worker,
    )
    if settings.tells:
        server.tell_choices()
    commands: dict[str, Callable[[], object]] = {
        "drain": server.drain,
        "stop": server.stop_now,
        "announce": server.announce,
    }
    if opened is not None:
        commands["open"] = opened.set
    loop = asyncio.get_running_loop()

    def on_engine(index: int, event: str, engine_folder: str = "") -> None:
        if isinstance(client, RemoteEngineClient):
            client.engine_died(ENGINE_ENDED)
        elif event == "died":
            client.engine_died(index, ENGINE_ENDED)
        else:
            client.replace(index, pathlib.Path(engine_folder))

    def on_command(command: str) -> None:
        if command.startswith("engine "):
            _, index, *event = command.split(" ", 3)
            loop.call_soon_threadsafe(on_engine, int(index), *event)
        else:
            loop.call_soon_threadsafe(commands[command])

    parent.on_command = on_command
    return server, client


async def _connect(settings: Settings) -> RemoteEngineClient | ReplicatedEngineClient:
    folders = {index: pathlib.Path(folder) for index, folder in settings.engines.items()}
    if settings.num_engines == 1:
        return await RemoteEngineClient.connect(folders[0], settings.name)
    return await ReplicatedEngineClient.connect(folders, settings.name, num_engines=settings.num_engines)


def _main(parent: Parent) -> int:
    settings = parent.settings(Settings)
    parent.folder = settings.folder
    server = settings.server
    logs.configure(server.log_level, server.log_format, in_background=True, process_name=settings.log_name)
    return uvloop.run(_serve(parent, settings))


if __name__ == "__main__":
    sys.exit(run_child(_main))
