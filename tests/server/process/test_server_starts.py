"""The start of `jaxserve serve`: what clients and people see of it, and what its processes lack."""

import contextlib
import fcntl
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile

import fake_serve
import httpx
import psutil
import pytest
from depths import quick_first
from server_processes import client, stream
from serving import assert_error
from waiting import PATIENCE, until, wait_until


@pytest.mark.slow
def test_the_first_lines_say_once_how_answers_are_read(start):
    chat = ("--tool-call-parser", "hermes", "--chat-template", "{{ messages[0].content }}")
    server = start("--api-workers", "2", *chat).wait_until_serving()
    server.process.terminate()
    assert server.wait() == 0
    log = server.rest_of_log()
    assert log.count("tool calls: hermes, by the option") == 1
    assert log.count("reasoning: not parsed, no known syntax in the chat template") == 1


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", ["1", "2"])
def test_the_port_is_taken_before_the_engine_starts(start, num_workers):
    """Servers of several workers, which listen on one port together, take it early, too."""
    server = start("--start-error", "hang", "--api-workers", num_workers)
    server.wait_for_children(1 + int(num_workers))
    port = server.port()
    second = start("--port", str(port), "--api-workers", num_workers)
    assert second.wait() == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in second.rest_of_log()


@pytest.mark.parametrize(
    ("error", "message"),
    quick_first(
        [("the weights do not fit", "the weights do not fit"), ("crash", "the engine has ended with code 1 .*")]
    ),
)
def test_a_start_that_fails_is_one_line(start, error, message):
    server = start("--start-error", error)
    assert server.wait() == 1
    *_, last = server.rest_of_log().splitlines()
    assert re.fullmatch(f"jaxserve: error: {message}", last)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", quick_first(["1", "2"]))
def test_what_is_answered_while_it_starts_and_a_signal_as_soon_as_it_is_well(start, num_workers):
    server = start("--start-error", "hang", "--api-workers", num_workers, "--api-key", "secret")
    server.wait_for_children(1 + int(num_workers))
    url = f"http://127.0.0.1:{server.port()}"

    def get(path):
        return httpx.get(f"{url}/{path}", timeout=PATIENCE, verify=False)

    for _ in range(2 * int(num_workers)):
        assert get("live").status_code == 200
        health = get("health")
        assert (health.status_code, health.json()) == (503, {"status": "the server is starting"})
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=PATIENCE, verify=False)
        assert_error(refused, 503, None, "service_unavailable_error")
        assert refused.headers["retry-after"] == "5"
    (server.folder / fake_serve.START).touch()
    wait_until(lambda: get("health").status_code == 200)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    log = server.rest_of_log()
    assert log.count("shutting down\n") == int(num_workers)
    assert "Traceback" not in log


@pytest.mark.slow
def test_a_signal_while_it_starts(start):
    server = start("--start-error", "hang")
    server.wait_for_children(2)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 128 + signal.SIGTERM
    assert "Traceback" not in server.rest_of_log()


@pytest.mark.slow
async def test_a_log_that_nobody_reads_stops_nothing(start):
    server = start("--api-workers", "2", "--log-level", "debug").wait_until_serving()
    fcntl.fcntl(server.process.stderr, fcntl.F_SETPIPE_SZ, 4096)
    async with client() as http:
        for _ in range(100):
            assert (await http.get(f"{server.url}/live")).status_code == 200
            assert (await http.get(f"{server.url}/version")).status_code == 200
        assert await stream(http, server.url, max_tokens=3) == (200, "aaa", None)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0


@pytest.fixture
def disk():
    """A folder with its own file system of one megabyte, and a function that fills it."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="js"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        folder.rmdir()
        pytest.skip("a file system cannot be mounted here")

    def fill():
        with contextlib.suppress(OSError), (folder / "filler").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    yield folder, fill
    subprocess.run(["umount", "-l", str(folder)], check=True)
    folder.rmdir()


def has_database(server):
    """Return whether anything of the database of responses has been written."""
    return any(path.stat().st_size for path in pathlib.Path(server.temporary.name).rglob("responses.sqlite*"))


@pytest.mark.slow
@pytest.mark.parametrize("is_full_at_start", [True, False])
async def test_a_full_disk_costs_only_what_needs_it(disk, start, is_full_at_start):
    folder, fill = disk
    server = start("--api-workers", "2", folder=folder)
    if is_full_at_start:
        for _ in range(10):
            # Python's tempfile writes a file first; where it cannot, it takes another folder.
            wait_until(lambda server=server: list(pathlib.Path(server.temporary.name).glob("*/")))
            fill()
            if not has_database(server):
                break
            server.process.kill()  # it was quicker than the disk was full
            (folder / "filler").unlink()
            server = start("--api-workers", "2", folder=folder)
        else:
            pytest.fail("the disk was never full before the database was written")
    server.wait_until_serving()
    if not is_full_at_start:
        fill()

    body = {"input": "a", "max_output_tokens": 3}
    async with client() as http:
        answers = [await http.post(f"{server.url}/v1/responses", json=body) for _ in range(8)]
        texts = [await stream(http, server.url, max_tokens=3) for _ in range(4)]
        statuses = {(await http.get(f"{server.url}/{path}")).status_code for path in ("health", "metrics", "live")}
        in_background = await http.post(f"{server.url}/v1/responses", json=body | {"background": True})
    assert [answer.status_code for answer in answers] == [200] * 8
    assert [answer.json()["store"] for answer in answers] == [is_full_at_start] * 8  # then they are kept in memory
    assert texts == [(200, "aaa", None)] * 4
    assert statuses == {200}
    assert in_background.status_code == (200 if is_full_at_start else 503)
    (folder / "filler").unlink()
    answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=PATIENCE, verify=False)
    assert answer.json()["store"] is True
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    log = server.rest_of_log()
    assert "database or disk is full" in log or "No space left on device" in log
    assert "Traceback" not in log


@pytest.mark.slow
async def test_too_few_file_descriptors_are_reported(start):
    server = start().wait_until_serving()
    (worker,) = server.workers
    limit = worker.num_fds() + 8
    worker.rlimit(psutil.RLIMIT_NOFILE, (limit, limit))
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port()), PATIENCE))
        server.read_log_until("connections are turned away: Too many open files")

    async def answered():
        async with client() as http:
            with contextlib.suppress(httpx.TransportError):
                return await stream(http, server.url, max_tokens=3) == (200, "aaa", None)
        return False

    await until(answered)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert "turned away" not in server.rest_of_log().partition("turned away")[2]
