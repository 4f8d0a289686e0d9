"""The processes of `jaxserve serve`: what remains, and what clients see, when one of them ends."""

import asyncio
import contextlib
import pathlib
import re
import signal

import fake_serve
import httpx
import psutil
import pytest
from server_processes import client, load, metric, stream
from serving import assert_error
from waiting import PATIENCE, until, wait_until

from jaxserve.server.process import supervisor


@pytest.mark.slow
async def test_workers_share_an_engine_and_are_replaced_and_drain(start):
    """SIGTERM under load, and kill -9 of an API worker before."""
    server = start("--api-workers", "2", "--shutdown-timeout", str(PATIENCE)).wait_until_serving()
    workers = server.workers
    assert len(workers) == 2

    unwatched = []

    def num_connections(worker):
        return sum(each.status == psutil.CONN_ESTABLISHED for each in worker.net_connections("tcp"))

    async def begin(http):
        body = {"input": "a", "background": True, "max_output_tokens": 1900}
        answer = await http.post(f"{server.url}/v1/responses", json=body)
        return f"{server.url}/v1/responses/{answer.json()['id']}"

    async def are_told(http, number):
        statuses = [(await http.get(path)).json()["status"] for path in unwatched]
        assert set(statuses) <= {"in_progress", "failed"}
        return await are_running(http, number - statuses.count("failed"))

    async def are_running(http, number, is_so=True):
        with contextlib.suppress(httpx.TransportError):  # the worker that is asked may be the one that is killed
            return (await metric(http, server.url, "num_requests_running") == number) == is_so

    async def replaced():
        server.children = psutil.Process(server.process.pid).children(recursive=True)
        ready = [
            child for child in psutil.Process(server.process.pid).children() if child.status() != psutil.STATUS_ZOMBIE
        ]
        return len(ready) == 3 and all(child.net_connections("tcp") for child in ready if child != server.engine)

    async def refused():
        async with client() as http:
            try:
                return (await http.get(f"{server.url}/health")).status_code == 503
            except httpx.TransportError:
                return True  # by then it may take no connection any more

    async with client() as http:
        doomed = []
        while not all(map(num_connections, workers)):  # the kernel distributes connections as it likes
            doomed += await load(http, server.url, 12, max_tokens=2000)
        unwatched[:] = await asyncio.gather(*(begin(http) for _ in range(8)))
        number = len(doomed) + 8
        await until(lambda: are_running(http, number))
        workers[0].kill()
        await until(lambda: are_running(http, number, False))
        tokens = await metric(http, server.url, "generation_tokens_total")
        assert tokens >= len(doomed)  # those of the dead one still count

        await until(replaced)
        await asyncio.to_thread(server.read_log_until, "is there again")
        # The engine has dropped the requests of the dead worker, and nothing else; its successor reports so.
        await until(lambda: are_told(http, number - sum(task.done() for task in doomed)))
        ended = [task for task in doomed if task.done()]
        assert 0 < len(ended) < len(doomed)
        assert all(isinstance(task.exception(), httpx.RemoteProtocolError | httpx.ReadError) for task in ended)
        for path in unwatched:
            assert (await http.delete(path)).status_code == 200
        assert await metric(http, server.url, "generation_tokens_total") >= tokens
        answers = await asyncio.gather(*(stream(http, server.url, max_tokens=3) for _ in range(8)))
        assert answers == [(200, "aaa", None)] * 8

        for task in doomed:
            task.cancel()
        finishing = await load(http, server.url, 8, max_tokens=100)
        server.process.send_signal(signal.SIGTERM)
        await until(refused)
        assert await asyncio.gather(*finishing) == [(200, "a" * 100, None)] * 8
    assert server.wait() == 0
    log = server.rest_of_log()
    (number,) = re.findall(r"API worker (\d) has been killed", log)
    assert f"API worker {number} is there again\n" in log
    assert "Traceback" not in log


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "exception"])
async def test_the_end_of_the_engine(start, how):
    server = start().wait_until_serving()
    assert server.folder.stat().st_mode & 0o777 == 0o700
    (worker,) = server.workers
    loaded = {pathlib.Path(each.path).name for each in worker.memory_maps()}
    assert any("zmq" in name for name in loaded)
    assert not any("jaxlib" in name or "libjax" in name for name in loaded)

    async def running(http, number):
        return await metric(http, server.url, "num_requests_running") == number

    async def unhealthy(http):
        with contextlib.suppress(httpx.TransportError):
            return (await http.get(f"{server.url}/health")).status_code == 503
        pytest.fail("the server was gone before it said that it is not healthy")

    async with client() as http:
        assert (await http.get(f"{server.url}/health")).status_code == 200
        streams = await load(http, server.url, 4, max_tokens=2000)
        whole = asyncio.create_task(stream(http, server.url, max_tokens=2000, stream=False))
        await until(lambda: running(http, 5))
        _, inside = await asyncio.open_connection(*re.search(r"//(.*):(\d+)", server.url).groups())
        inside.write(HEAD)  # as long as it waits for its body, /health is there to be asked
        await until(lambda: running(http, 5))
        if how == "kill":
            server.engine.kill()
        else:
            streams.append(asyncio.create_task(stream(http, server.url, prompt="D", max_tokens=2000)))
        await until(lambda: unhealthy(http))
        inside.close()
        streams, (status, _, whole) = await asyncio.gather(*streams), await whole
    assert all(status == 200 and error["type"] == "service_unavailable_error" for status, _, error in streams[:4])
    assert status == 503
    assert_error(whole, 503, None, "service_unavailable_error")
    assert server.wait() == 1
    killed = "'s process has been killed (SIGKILL: by hand, or by the system for lack of memory)"
    why = killed if how == "kill" else " has given up: the engine has stopped: a bug in the engine"
    assert server.rest_of_log().endswith(f"the engine{why}\n")


@pytest.mark.slow
async def test_the_end_of_the_parent(start):
    server = start("--api-workers", "2").wait_until_serving()

    async with client() as http:
        streams = await load(http, server.url, 2, max_tokens=2000)
        server.process.kill()
        results = await asyncio.gather(*streams, return_exceptions=True)
    # The engine may be gone before the API worker is, which then has the time to report it.
    for result in results:
        assert isinstance(result, httpx.TransportError) or result[2]["type"] == "service_unavailable_error"
    assert server.wait() == -signal.SIGKILL


@pytest.mark.slow
async def test_nothing_waits_for_a_long_step_nor_after_a_second_signal(start):
    server = start("--shutdown-timeout", str(10 * PATIENCE)).wait_until_serving()

    async def during_a_long_step(http):
        folder = server.folder
        long = asyncio.create_task(stream(http, server.url, prompt="L", max_tokens=1))
        await until((folder / fake_serve.IN_STEP).exists)
        for path in ("health", "metrics"):
            assert (await http.get(f"{server.url}/{path}")).status_code == 200
        assert not long.done()
        (folder / fake_serve.STEP_OVER).touch()
        assert await long == (200, "L", None)

    async def is_draining(http):
        return (await http.get(f"{server.url}/health")).status_code == 503

    async with client() as http:
        await during_a_long_step(http)
        streams = await load(http, server.url, 2, max_tokens=2000)
        server.process.send_signal(signal.SIGINT)
        await until(lambda: is_draining(http))
        assert not any(task.done() for task in streams)
        server.process.send_signal(signal.SIGTERM)
        assert all(error["type"] == "service_unavailable_error" for _, _, error in await asyncio.gather(*streams))
    assert server.wait() == 0


@pytest.mark.slow
def test_a_signal_after_the_end_changes_no_exit_code(start):
    server = start("--late-signal").wait_until_serving()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0


@pytest.mark.slow
def test_a_signal_while_a_worker_is_being_replaced(start):
    server = start("--shutdown-timeout", str(10 * PATIENCE)).wait_until_serving()
    (worker,) = server.workers
    worker.kill()
    wait_until(lambda: not worker.is_running())
    server.wait_for_children(2)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0


def test_workers_that_keep_dying_are_not_replaced_for_ever():
    restarts = supervisor.Restarts()
    assert [restarts.may_follow(float(now)) for now in range(supervisor.MAX_RESTARTS + 1)] == [True] * 5 + [False]
    assert restarts.may_follow(supervisor.RESTART_PERIOD + supervisor.MAX_RESTARTS)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "silent", "hangs"])
async def test_engines_behind_one_server_and_the_death_of_one(start, how):
    """Both get requests; the dead one's fail, all others are answered, and it comes back for the workers that are there
    and for one that was replaced; so does the one that took its place. One that is silent is killed, one that is dead
    ends, even if its exit hangs, and one whose start fails is started once more.
    """
    flags = {"killed": ["--second-start-fails"], "silent": ["--silence-limit", "5"], "hangs": ["--never-ends"]}[how]
    server = start("--data-parallel-size", "2", "--api-workers", "2", *flags).wait_until_serving()
    async with client() as http:
        answers = await asyncio.gather(*(stream(http, server.url, max_tokens=3) for _ in range(16)))
        assert answers == [(200, "aaa", None)] * 16
        running = await load(http, server.url, 12, max_tokens=300)
        engine, other = server.engines
        if how == "hangs":
            running.append(asyncio.create_task(stream(http, server.url, prompt="D", max_tokens=2000)))
        else:
            engine.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        ended = await asyncio.gather(*running, return_exceptions=True)
        failed = [answer for answer in ended if answer != (200, "a" * 300, None)]
        assert 0 < len(failed) < len(ended), ended
        reason = "a bug in the engine" if how == "hangs" else "the engine has stopped"
        assert all(reason in str(answer) for answer in failed)
        if how == "hangs":
            await asyncio.to_thread(server.read_log_until, "engine . has given up: the engine has stopped: a bug")
        answers = await asyncio.gather(*(stream(http, server.url, max_tokens=3) for _ in range(8)))
        assert answers == [(200, "aaa", None)] * 8
        await asyncio.to_thread(server.read_log_until, "engine . is there again")
        server.wait_for_children(4)
        next(each for each in server.engines if each not in (engine, other)).kill()
        await asyncio.to_thread(server.read_log_until, "engine . is there again")
        server.wait_for_children(4)
        server.workers[0].kill()
        await asyncio.to_thread(server.read_log_until, "API worker . is there again")
        answers = await asyncio.gather(*(stream(http, server.url, max_tokens=3) for _ in range(16)))
        assert answers == [(200, "aaa", None)] * 16
        assert (await http.get(f"{server.url}/health")).status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0


@pytest.mark.slow
def test_the_death_of_all_engines_ends_the_server(start):
    server = start("--data-parallel-size", "2").wait_until_serving()
    for engine in server.engines:
        engine.kill()
    assert server.wait() == 1
