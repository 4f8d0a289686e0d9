"""The wire when an engine or its process ends, is silent, or comes late."""

import asyncio
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest
from fake_client import FakeEngineClient, Script
from remote_engine import Engine, Sink, connected, request
from waiting import PATIENCE, until

from jaxserve.engine import process, remote
from jaxserve.engine.process import EngineServer
from jaxserve.engine.remote import RemoteEngineClient
from jaxserve.engine.replicas import ReplicatedEngineClient
from jaxserve.errors import EngineDead


async def test_the_death_of_the_engine_is_an_error_of_every_request():
    engine = Engine()
    engine.play = lambda request: Script(token_ids=[5], hangs=True)
    async with connected(engine, "x", "y") as clients:
        sinks = [Sink(), Sink()]
        alive = []
        for client, sink, name in zip(clients, sinks, "ab", strict=True):

            def take(outputs, client=client, sink=sink):
                alive.append(client.is_alive())
                sink(outputs)

            client.submit([request(name)], take)
        await until(lambda: all(sink.outputs for sink in sinks))
        assert alive == [True, True]
        engine.client.die("the device is gone")
        await until(lambda: all(sink.reasons for sink in sinks))
        assert alive == [True, True, False, False]  # when the error arrives, the engine already counts as dead
        assert [sink.outputs[-1].error for sink in sinks] == ["the device is gone"] * 2
        with pytest.raises(EngineDead, match="device"):
            clients[0].submit([request("c")], Sink())
    engine.close()
    assert engine.was_alive is False


async def test_a_request_that_the_end_of_the_process_cuts_off_has_failed(engine):
    """The engine closes in good order when its parent is gone, and aborts what it runs; no client has asked for it."""
    engine.play = lambda request: Script(token_ids=[5], hangs=True)
    async with connected(engine, "x") as (x,):
        sink = Sink()
        x.submit([request("a")], sink)
        await until(lambda: bool(sink.outputs))
        engine.client.close()
        await until(lambda: bool(sink.reasons))
        assert sink.reasons == {"a": "error"}
        assert sink.outputs[-1].error == "the engine has stopped: it is closed"


async def test_a_process_that_ends_without_a_word(engine):
    engine.play = lambda request: Script(token_ids=[5], hangs=True)
    async with connected(engine, "x") as (x,):
        sink = Sink()
        x.submit([request("a")], sink)
        await until(lambda: bool(sink.outputs))
        x.engine_died("its process has ended")
        assert not x.is_alive()
        assert sink.reasons == {"a": "error"}
        with pytest.raises(EngineDead, match="its process has ended"):
            await asyncio.to_thread(x.reset_prefix_cache)


async def test_silence_counts_as_death(engine, monkeypatch):
    monkeypatch.setattr(remote, "TICK", 0.01)
    async with connected(engine, "x") as (x,):
        assert x.is_alive()
        monkeypatch.setattr(remote, "SILENCE_LIMIT", 0.1)
        monkeypatch.setattr(engine.server, "_send_stats", lambda: None)
        await until(lambda: not x.is_alive())
        with pytest.raises(EngineDead, match="nothing has been heard"):
            x.submit([request("a")], Sink())


LISTEN = """
import asyncio, pathlib, sys, uvloop
from jaxserve.engine import remote
remote.SILENCE_LIMIT, remote.TICK = 2.0, 0.1

async def listen():
    client = await remote.RemoteEngineClient.connect(pathlib.Path(sys.argv[1]), "x")
    print("connected", flush=True)
    is_over = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    while not is_over.done() and client.is_alive():
        await asyncio.sleep(0.01)
    print("alive" if client.is_alive() else "dead", flush=True)
    client.close()

uvloop.run(listen())
"""


@pytest.mark.slow
def test_who_was_paused_takes_nobody_for_dead(engine, monkeypatch):
    """Everybody is paused when a container is: the engine reports nothing in that time either."""
    is_paused, send_stats = threading.Event(), engine.server._send_stats
    monkeypatch.setattr(process, "STATS_INTERVAL", 0.01)
    monkeypatch.setattr(engine.server, "_send_stats", lambda: is_paused.is_set() or send_stats())
    command = [sys.executable, "-c", LISTEN, str(engine.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as listener:
        try:
            assert listener.stdout.readline() == "connected\n"
            is_paused.set()
            listener.send_signal(signal.SIGSTOP)
            time.sleep(2.5)
            listener.send_signal(signal.SIGCONT)
            time.sleep(0.2)
            is_paused.clear()
            assert listener.communicate("\n", timeout=PATIENCE)[0] == "alive\n"
        finally:
            listener.kill()


async def test_a_client_may_come_before_the_engine():
    folder = pathlib.Path(tempfile.mkdtemp(prefix="js"))
    connecting = asyncio.create_task(RemoteEngineClient.connect(folder, "early"))
    await asyncio.sleep(0.2)
    assert not connecting.done()
    fake = FakeEngineClient()
    server = EngineServer(fake, folder)
    running = asyncio.create_task(asyncio.to_thread(server.run))
    client = await asyncio.wait_for(connecting, PATIENCE)
    assert client.info == fake.info
    client.close()
    server.stop()
    assert await running
    shutil.rmtree(folder)


async def test_an_engine_that_dies_before_it_answers_leaves_no_connection():
    engines = Engine(), Engine()
    folders = {index: engine.folder for index, engine in enumerate(engines)}
    client = await ReplicatedEngineClient.connect(folders, "x", num_engines=2)
    client.engine_died(0, "killed")
    tasks, descriptors = asyncio.all_tasks(), os.listdir("/proc/self/fd")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="js"))
    client.replace(0, folder)
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) > len(descriptors)
    client.engine_died(0, "killed again")
    await until(lambda: asyncio.all_tasks() <= tasks and len(os.listdir("/proc/self/fd")) <= len(descriptors))
    client.close()
    for engine in engines:
        engine.close()
    shutil.rmtree(folder)
