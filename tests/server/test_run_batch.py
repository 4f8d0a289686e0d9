"""`run-batch`: a file of requests in, a file of answers out, over a scripted engine."""

import codecs
import collections
import contextlib
import errno
import io
import json
import os
import threading

import pytest
import tiny_model
from fake_client import FakeEngineClient, Script, echo
from serving import byte_tokenizer

from jaxserve import cli
from jaxserve.config import ServerConfig
from jaxserve.engine.frontend import Frontend
from jaxserve.errors import EngineDead, InvalidRequest
from jaxserve.server import batch
from jaxserve.server.middleware import admission

CHAT = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3}
COMPLETION = {"prompt": "abc", "max_tokens": 3}


def line(custom_id, body=COMPLETION, url="/v1/completions", **fields):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body} | fields


class Files:
    """The two files, and an engine that plays `play`."""

    def __init__(self, folder):
        self.source, self.destination = folder / "in.jsonl", folder / "out.jsonl"
        self.play = echo
        self.client = None

    def write(self, *lines):
        texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
        self.source.write_text("".join(text + "\n" for text in texts))

    def run(self, *, overwrite=False):
        wanted = batch.check_input(self.source)
        with batch.open_output(self.destination, wanted, source=self.source, overwrite=overwrite) as output:
            return self.answer(output)

    def answer(self, output):
        tokenizer = byte_tokenizer()
        self.client = FakeEngineClient(lambda request: self.play(request), vocab_size=tokenizer.vocab_size)
        config = ServerConfig(served_model_name="m", access_log=False)
        try:
            frontend = Frontend(self.client, tokenizer, seed=0)
            return batch.run(frontend, config, source=self.source, output=output, progress=False)
        finally:
            self.client.close()

    @property
    def results(self):
        """The output's lines, by custom_id."""
        lines = [json.loads(text) for text in self.destination.read_text().splitlines()]
        by_id = {each["custom_id"]: each for each in lines}
        assert len(by_id) == len(lines)
        return by_id


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


def test_every_endpoint(files):
    files.write(
        line("chat", CHAT, "/v1/chat/completions"),
        "",
        line("completion", {**COMPLETION, "model": "m"}),
        line("embedding", {"input": "abc"}, "/v1/embeddings"),
        line("response", {"input": "abc", "max_output_tokens": 3}, "/v1/responses"),
        *(line(path, {"text_1": "abc", "text_2": ["a"]}, path) for path in ("/v1/score", "/score")),
        *(line(path, {"query": "abc", "documents": ["a"]}, path) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
    )
    assert files.run() == (9, 0, 0)
    objects = {"chat": "chat.completion", "completion": "text_completion", "embedding": "list", "response": "response"}
    objects |= dict.fromkeys(("/v1/score", "/score"), "list")
    for name, result in files.results.items():
        assert list(result) == ["id", "custom_id", "response", "error"]
        assert result["id"].startswith("batch_req_")
        assert result["error"] is None
        response = result["response"]
        assert list(response) == ["status_code", "request_id", "body"]
        assert response["status_code"] == 200
        assert response["request_id"]
        assert response["body"].get("object") == objects.get(name)
    assert files.results["completion"]["response"]["body"]["choices"][0]["text"] == "abc"


def test_a_file_may_begin_with_a_byte_order_mark(files):
    files.write(line("first", COMPLETION), line("second", COMPLETION))
    files.source.write_bytes(codecs.BOM_UTF8 + files.source.read_bytes())
    files.run()
    assert {name: each["response"]["status_code"] for name, each in files.results.items()} == {
        "first": 200,
        "second": 200,
    }


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "invalid_line"),
        ("5", "invalid_line"),
        ("[" * 5000, "invalid_line"),
        ({"custom_id": "x", "body": {}}, "invalid_line"),
        ({"custom_id": 5, "url": "/v1/completions", "body": {}}, "invalid_line"),
        (line("x", method="GET"), "invalid_method"),
        (line("x", url="/v1/models"), "invalid_url"),
        (line("x", url="https://example.org/v1/completions"), "invalid_url"),
        (line("x", {**COMPLETION, "stream": True}), "invalid_request"),
        (line("x", {"input": "a", "background": True}, "/v1/responses"), "invalid_request"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_line_that_is_no_request_costs_only_itself(files, text, code):
    files.write(line("a"), text, line("b"))
    assert files.run() == (2, 1, 0)
    results = files.results
    assert results.keys() > {"a", "b"}
    (wrong,) = results.keys() - {"a", "b"}
    assert wrong == (text["custom_id"] if isinstance(text, dict) and text["custom_id"] == "x" else None)
    assert results[wrong]["response"] is None
    assert results[wrong]["error"]["code"] == code
    assert results[wrong]["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": "a", "temperature": -1}, 400, "temperature"),
        ({"prompt": 5}, 400, "prompt"),
        ({}, 400, "prompt"),
        ({"prompt": "a", "model": "other"}, 404, "model"),
        ([], 400, None),
    ],
)
def test_what_a_route_refuses_is_its_answer(files, body, status, param):
    files.write(line("a", body), line("b"))
    assert files.run() == (1, 1, 0)
    result = files.results["a"]
    assert result["error"] is None
    assert result["response"]["status_code"] == status
    assert result["response"]["body"]["error"]["param"] == param


def test_a_run_goes_on_where_the_last_one_ended(files):
    files.write(*(line(f"{number}") for number in range(6)))
    answered = {"custom_id": "1", "id": "x", "error": None}
    old = [
        answered | {"response": {"status_code": 200, "request_id": "r", "body": {"kept": 1}}},
        answered | {"custom_id": "2", "response": {"status_code": 400, "request_id": "r", "body": {"kept": 2}}},
        answered | {"custom_id": "3", "response": {"status_code": 500, "request_id": "r", "body": {}}},
        answered | {"custom_id": None, "response": None, "error": {"code": "invalid_line", "message": "m"}},
    ]
    cut = '{"id": "x", "custom_id": "4", "respo'
    files.destination.write_text("".join(json.dumps(each) + "\n" for each in old) + cut)
    assert files.run() == (5, 1, 0)
    assert len(files.client.submitted) == 4
    results = files.results
    assert results.keys() == {f"{number}" for number in range(6)}
    assert [results[name]["response"]["body"] for name in ("1", "2")] == [{"kept": 1}, {"kept": 2}]
    assert files.run() == (5, 1, 0)
    assert files.client.submitted == [], "all is there"
    assert files.run(overwrite=True) == (6, 0, 0)
    assert len(files.client.submitted) == 6


@pytest.mark.parametrize(
    "text", ["no answers\n", '{"custom_id": "other", "id": "x", "response": null, "error": null}\n']
)
def test_another_file_is_not_overwritten_by_mistake(files, text):
    files.write(line("a"))
    files.destination.write_text(text)
    with pytest.raises(InvalidRequest, match="choose another file"):
        files.run()
    assert files.destination.read_text() == text
    assert sorted(path.name for path in files.destination.parent.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_files_that_do_not_fit(files, tmp_path):
    files.write(line("a"), line("b"), line("a"))
    with pytest.raises(InvalidRequest, match="request 3 has the custom_id of request 1, 'a'"):
        files.run()
    files.source.unlink()
    with pytest.raises(InvalidRequest, match=r"cannot read .*in\.jsonl: No such file"):
        files.run()
    files.write(line("a"))
    files.destination = tmp_path / "nowhere" / "out.jsonl"
    with pytest.raises(InvalidRequest, match=r"cannot write .*out\.jsonl: No such file"):
        files.run()


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_input_has_an_empty_output(tmp_path, capsys, text):
    source, destination = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(text)
    command = ["run-batch", "-i", str(source), "-o", str(destination), "--model", str(tmp_path / "no model")]
    assert cli.main(command) == 0, "no model is loaded for it"
    assert capsys.readouterr().err.endswith("out.jsonl: nothing to answer, the input holds no requests\n")
    assert destination.read_bytes() == b""


def test_what_cannot_be_written_is_told_before_a_model_is_loaded(files, tmp_path, capsys):
    files.write(line("a"))
    command = ["run-batch", "-i", str(files.source), "--model", str(tmp_path / "no model"), "-o"]
    assert cli.main([*command, str(tmp_path / "nowhere" / "out")]) == 1
    assert "nowhere/out: No such file" in capsys.readouterr().err
    files.run()
    answers = files.destination.read_text()
    assert cli.main([*command, str(files.destination), "--overwrite"]) == 1
    assert "no model" in capsys.readouterr().err
    assert files.destination.read_text() == answers, "they are dropped when others can be written"


@pytest.mark.parametrize("overwrite", [False, True])
def test_whoever_has_the_output_open_reads_the_answers(files, overwrite):
    """A file that exists is written to, not replaced; lines that another run repeats are removed from it."""
    failed = {"id": "x", "custom_id": "b", "response": {"status_code": 500, "request_id": "r", "body": {}}}
    kept = failed | {"custom_id": "a", "error": None, "response": failed["response"] | {"status_code": 200}}
    files.write(line("a"), line("b"))
    files.destination.write_text("".join(json.dumps(each) + "\n" for each in (failed | {"error": None}, kept)))
    with files.destination.open() as reader:
        assert files.run(overwrite=overwrite) == (2, 0, 0)
        assert {json.loads(text)["custom_id"] for text in reader} == {"a", "b"}
    assert sorted(path.name for path in files.destination.parent.iterdir()) == ["in.jsonl", "out.jsonl"]
    assert len(files.client.submitted) == 1 + overwrite


def test_neither_the_input_nor_a_pipe_is_replaced(files):
    files.write(line("a"))
    text = files.source.read_bytes()
    files.destination.symlink_to(files.source)
    with pytest.raises(InvalidRequest, match="is the input: choose another file"):
        files.run(overwrite=True)
    assert files.source.read_bytes() == text
    for path, overwrite in ((files.destination, False), (files.destination, True), (files.source, False)):
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(InvalidRequest, match="it is no regular file"):
            files.run(overwrite=overwrite)
        assert path.is_fifo()


def test_what_was_answered_before_the_engine_died_is_kept(files):
    def play(request):
        if len(request.prompt_token_ids) > 10:
            threading.Timer(0.3, files.client.die).start()
            return Script(token_ids=[5], hangs=True)
        return echo(request)

    files.play = play
    files.write(line("a"), line("b", {"prompt": "a" * 20}), line("c"))
    with pytest.raises(EngineDead, match="run the command again"):
        files.run()
    assert files.results.keys() == {"a", "c"}
    files.play = echo
    assert files.run() == (3, 0, 0)


def test_what_was_answered_before_the_disk_was_full_is_kept(files, monkeypatch):
    class Full(io.FileIO):
        def write(self, data):
            if b'"custom_id":"b"' in bytes(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    @contextlib.contextmanager
    def opened(destination, *arguments, **options):
        with open_output(destination, *arguments, **options) as output:
            full = io.BufferedRandom(Full(destination, "r+"))
            try:
                yield output._replace(file=full)
            finally:
                with contextlib.suppress(OSError):
                    full.close()

    open_output = batch.open_output
    files.write(line("a"), line("b"), line("c"))
    with monkeypatch.context() as patch:
        patch.setattr(batch, "open_output", opened)
        with pytest.raises(InvalidRequest, match=r"out\.jsonl: No space left on device; run the command again"):
            files.run()
    assert "b" not in files.results
    assert files.run() == (3, 0, 0)


def test_large_lines_wait_for_each_other(files, monkeypatch):
    monkeypatch.setattr(admission, "MAX_HELD_BYTES", 0)  # two of the largest bodies may be held at once
    files.write(*(line(f"{number}", {**COMPLETION, "user": "x" * 4_000_000}) for number in range(6)))
    assert files.run() == (6, 0, 0)


@pytest.mark.slow
def test_so_many_at_once_that_the_engine_is_busy_and_no_more(files):
    most = 0
    sizes = collections.Counter()

    def play(request):
        nonlocal most
        most = max(most, files.client.num_running + 1)
        sizes[request.request_id] += 1
        return echo(request)

    files.play = play
    files.write(*(line(f"{number}", {"prompt": "abc", "max_tokens": 30}) for number in range(400)))
    assert files.run() == (400, 0, 0)
    assert most <= batch.REQUESTS_PER_SEQUENCE * files.client.info.max_num_seqs
    assert most > 8


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    source, destination = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    command = ["run-batch", "-i", str(source), "-o", str(destination), "--load-format", "dummy", "--warmup", "none"]
    command += ["--model", str(tiny_model.write(tmp_path / "model")), "--served-model-name", "tiny"]
    assert cli.main(command) == 1
    assert f"cannot read {source}" in capsys.readouterr().err
    source.write_text(json.dumps(line("a", {"model": "tiny", "prompt": "abc", "max_tokens": 3})) + "\n")
    assert cli.main(command) == 0
    assert capsys.readouterr().err.endswith("out.jsonl: 1 answered\n")
    (answer,) = destination.read_text().splitlines()
    assert json.loads(answer)["response"]["body"]["usage"]["completion_tokens"] <= 3


def test_the_exit_code_says_whether_to_run_again(capsys, tmp_path):
    assert batch.tell(batch.Summary(3, 0, 0), tmp_path / "out") == 0
    assert batch.tell(batch.Summary(3, 1, 0), tmp_path / "out") == 3
    assert capsys.readouterr().err.endswith("out: 3 answered, 1 refused\n")
    assert batch.tell(batch.Summary(3, 1, 2), tmp_path / "out") == 1
    assert "2 failed; run the command again" in capsys.readouterr().err
