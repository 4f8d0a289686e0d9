"""Commands in README.md and docs/ are those that the command line takes, and examples answer as their page says.

An example is a fenced block: `bash` begins with `jaxserve serve` or `curl`, `python` is run. What it prints follows as
a `text` block, or as a `json` block with a part of the answer. Indented commands are read, but not run.
"""

import contextlib
import dataclasses
import io
import itertools
import json
import pathlib
import re
import shlex

import httpx
import pytest
from serving import Running
from waiting import PATIENCE

import jaxserve
from jaxserve import cli
from jaxserve.answers.choosing.served_tokenizer import served_tokenizer
from jaxserve.engine.frontend import Frontend
from jaxserve.engine.local import LocalEngineClient
from jaxserve.tokenizer import Tokenizer

ROOT = pathlib.Path(jaxserve.__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ADDRESS = "http://127.0.0.1:8000"


def blocks(page):
    """The fenced blocks of a page: kind and text."""
    return re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(text):
    """Commands of jaxserve in code: indented lines, or lines of a fenced block."""
    lines = text.replace("\\\n", " ").splitlines()
    return [found[1] for line in lines if (found := re.match(r"\s*(?:[A-Z_]+=\S+ )?(jaxserve .*)", line))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_known(page, capsys):
    """Those in indented and in fenced blocks, up to a pipe or a comment."""
    indented = "".join(re.findall(r"^    .*\n", page.read_text(), re.MULTILINE))
    fenced = [text for kind, text in blocks(page) if kind in ("bash", "sh")]
    for command in commands("\n".join([indented, *fenced])):
        words = shlex.split(command, comments=True)
        end = min((words.index(word) for word in "|<>&" if word in words), default=len(words))
        with contextlib.suppress(SystemExit):  # of --help
            assert cli._parser().parse_known_args(words[1:end])[1] == [], command
        assert "error:" not in capsys.readouterr().err, command


def test_what_a_refused_command_prints(served, capsys):
    (page,) = (page for page in PAGES if page.name == "vllm.md")
    (_, command), (_, printed) = blocks(page)[:2]
    with pytest.raises(SystemExit):
        cli.main(shlex.split(command)[1:])
    usage = "usage: jaxserve serve [MODEL] [options] "
    assert " ".join(capsys.readouterr().err.split()).replace(usage, "") == " ".join(printed.split())


@contextlib.contextmanager
def started(command, served):
    """The server of a command, with a small KV cache and only programs that requests need. Yields its address."""
    served.clear()
    assert cli.main(shlex.split(command[command.index("jaxserve") :])[1:]) == 0
    ((config, server_config),) = served
    small = {"kv_cache_memory": 2**22, "max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 256}
    config = dataclasses.replace(config, warmup="none", **small)
    tokenizer = served_tokenizer(Tokenizer.load(config.model), server_config)
    with contextlib.closing(LocalEngineClient.start(config)) as client:
        server = Running(Frontend(client, tokenizer, seed=0), dataclasses.replace(server_config, port=0))
        server.start()
        yield server.url
        server.server.stop()
        server.server.stop()
        server.wait()


def curl(command):
    """Send the request of a curl command."""
    words = shlex.split(command.replace("\\\n", " "))
    (body,) = (word for flag, word in itertools.pairwise(words) if flag == "-d")
    return httpx.post(words[1], content=body, headers={"Content-Type": "application/json"}, timeout=PATIENCE)


def is_part(shown, answer):
    """True if all that is shown is in the answer; numbers are rounded."""
    if isinstance(shown, dict):
        return all(name in answer and is_part(value, answer[name]) for name, value in shown.items())
    if isinstance(shown, list):
        return len(shown) == len(answer) and all(map(is_part, shown, answer))
    return answer == pytest.approx(shown, abs=6e-4) if isinstance(shown, float) else shown == answer


def examples():
    """Each server that a page starts, with the blocks that follow it; pages that start the same one share it."""
    servers = {}
    for page in PAGES:
        name = None
        for kind, text in blocks(page):
            if kind == "bash" and not text.startswith("curl"):
                name = text.strip() if re.match(r"(\S+=\S+ )?jaxserve serve scribe", text) else None
            elif name is not None:
                servers.setdefault(name, []).append((page.name, kind, text))
    return servers


@pytest.mark.slow
@pytest.mark.parametrize("command", examples())
def test_examples_answer_as_shown(command, served):
    with started(command, served) as url:
        answer = None
        for page, kind, text in examples()[command]:
            if kind == "bash":
                answer = curl(text.replace(ADDRESS, url))
                assert answer.status_code == 200, (page, answer.text)
            elif kind == "python" and ADDRESS in text:
                with contextlib.redirect_stdout(io.StringIO()) as printed:
                    exec(text.replace(ADDRESS, url), {})
                answer = printed.getvalue()
            elif kind == "json":
                assert is_part(json.loads(text), answer.json()), (page, answer.text)
            elif kind == "text" and isinstance(answer, str):
                assert text.strip() == answer.strip(), page
