"""Commands as processes of their own: what they print, signals, exit codes."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import openai
import pytest
from waiting import PATIENCE

import jaxserve.llm

BUILTIN = pathlib.Path(jaxserve.__file__).parents[1] / "checkpoints" / "scribe-2m"


@pytest.mark.parametrize(
    "command", [[pathlib.Path(sys.executable).with_name("jaxserve")], [sys.executable, "-m", "jaxserve"]]
)
def test_the_command_is_installed_and_knows_its_version(command):
    result = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"jaxserve {jaxserve.__version__}\n"


def _command(*arguments: str) -> dict:
    """Return arguments of subprocess that run the command in a process of its own, with one CPU device as users have
    it.
    """
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    # Tests that run in the background ignore SIGINT, and so would the command.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "import sys; from jaxserve.__main__ import main; sys.exit(main())"
    return {"args": [sys.executable, "-W", "error", "-c", code, *arguments], "env": environment, "text": True}


@pytest.mark.slow
def test_stories_continue_as_published(test_data):
    golden = (test_data / "models/stories260K/GOLDEN.md").read_text()
    published = golden.split("-t 0.0\n")[1].split("\n```")[0]
    model = str(test_data / "models/stories260K")
    command = _command("generate", "Once upon a time", "--model", model, "--temperature", "0", "--max-tokens", "150")
    result = subprocess.run(**command, capture_output=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    text = result.stdout.removesuffix("\n")
    assert published.startswith(text)
    assert len(text) > 350


@pytest.mark.slow
def test_serve_answers_and_ends_on_a_signal(test_data):
    model = str(test_data / "models/stories260K")
    command = _command("serve", model, "--port", "0", "--warmup", "none", "--served-model-name", "stories")
    with subprocess.Popen(**command, stderr=subprocess.PIPE) as server:
        try:
            log = []
            for line in server.stderr:
                log.append(line)
                if found := re.search(r"serving stories at (http://\S+)", line):
                    break
            else:
                pytest.fail("the server did not start:\n" + "".join(log))
            client = openai.OpenAI(base_url=found[1], api_key="none", max_retries=0, timeout=PATIENCE)
            completion = client.completions.create(
                model="stories", prompt="Once upon a time", max_tokens=8, temperature=0
            )
            assert completion.choices[0].text == ", there was a little girl"
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=PATIENCE) == 0
        finally:
            server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["serve", "--port", "0"], ["generate", "a", "--warmup", "full"]], ids=" ".join)
def test_interrupting_a_warm_up_is_quiet(arguments, tmp_path):
    """A terminal sends the signal to every process of the group."""
    command = _command(*arguments, "--model", str(BUILTIN), "--compilation-cache-dir", str(tmp_path))
    command |= {"text": False, "bufsize": 0, "start_new_session": True}
    with subprocess.Popen(**command, stderr=subprocess.PIPE) as process:
        try:
            log = b""
            while b"compiling" not in log:
                read = process.stderr.read(4096)
                assert read, log
                log += read
            os.killpg(process.pid, signal.SIGINT)
            log += process.communicate(timeout=PATIENCE)[1]
            assert process.returncode == 130, log
            assert b"Traceback" not in log
        finally:
            process.kill()
