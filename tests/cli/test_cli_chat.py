"""`jaxserve chat`: its history, its commands, and interrupts."""

import io
import signal
import sys

from jaxserve import cli
from jaxserve.sampling_params import SamplingParams


def test_chat_keeps_the_history(llm, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello there\n\nsecond turn\n/exit\nnever read\n"))
    assert cli.main(["chat", "--system", "be brief", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == " there hello\n turn second\n"
    assert llm.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": " there hello"},
        {"role": "user", "content": "second turn"},
    ]
    assert llm.asked[0][1] == SamplingParams(max_tokens=None, temperature=0.0)


def test_chat_obeys_commands(llm, capsys, monkeypatch):
    lines = ["/system be kind", "one", "/reset", "/system", "two", "/nonsense", "/help", "/quit", "never read"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    assert cli.main(["chat", "m"]) == 0
    assert llm.options["model"] == "m"
    assert llm.messages == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "two"}]
    out, err = capsys.readouterr()
    assert out.startswith(" one\nbe kind\n two\n/help")
    assert err == "There is no command /nonsense; /help lists them.\n"


def test_interrupting_a_chat_ends_the_answer_only(llm, monkeypatch, capsys, tmp_path, sigint):
    """Three Ctrl-C: in two answers, and at the prompt."""
    lines = iter(["one two", "three four", KeyboardInterrupt, "five"])

    def read(_prompt):
        line = next(lines, EOFError)
        if isinstance(line, str):
            return line
        raise line

    def stream(prompt, params):
        for delta in type(llm)._stream(llm, prompt, params):
            yield delta
            if "five" not in prompt:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(llm, "_stream", stream)
    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert cli.main(["chat"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [" two [stopped]", " four [stopped]", "", " five", ""]
    assert [message["content"] for message in llm.messages] == ["one two", " two", "three four", " four", "five"]


def test_chat_ends_with_its_input(llm, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi"))
    assert cli.main(["chat"]) == 0
    assert capsys.readouterr().out == " hi\n"
