"""`jaxserve parse`: text in, the message as JSON out, and on standard error by which syntax it was read."""

import io
import json
import shutil

import pytest
from chat_templates import KNOWN, UNKNOWN

from jaxserve import cli

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "ü"}}\n</tool_call>'


@pytest.fixture
def parse(monkeypatch, capsys):
    """Run the command; return its exit code, the message (None: there is none) and the lines on standard error."""

    def run(text, *arguments):
        data = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        code = cli.main(["parse", *arguments])
        out, errors = capsys.readouterr()
        return code, json.loads(out) if out else None, errors.splitlines()

    return run


@pytest.fixture
def model(tmp_path, test_data):
    """A model directory without weights, whose chat template the test writes."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(test_data / "models/stories260K" / name, tmp_path)
        (tmp_path / name).chmod(0o644)

    def write(template, **fields):
        file = tmp_path / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template} | fields))
        return str(tmp_path)

    return write


def calls_of(message):
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


@pytest.mark.parametrize("chunk", [[], ["--chunk", "1"], ["--chunk", "7"], ["--chunk", "100000"]])
def test_a_message_with_thoughts_words_and_a_call(parse, chunk):
    text = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}"
    code, message, errors = parse(text, "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", *chunk)
    assert code == 0
    assert message["role"] == "assistant"
    assert message["content"] == "I look."
    assert message["reasoning"] == message["reasoning_content"] == "Hm."
    assert calls_of(message) == [("f", {"a": "ü"})]
    assert message["tool_calls"][0].keys() == {"id", "type", "function"}
    assert errors == ["tool calls: hermes, by the option", "reasoning: qwen3, by the option"]


def test_words_alone(parse):
    _, message, _ = parse("1 < 2\n", "--tool-call-parser", "hermes")
    assert message["content"] == "1 < 2\n"
    assert "tool_calls" not in message
    assert parse("", "--tool-call-parser", "hermes")[1]["content"] == ""


def test_bytes_that_are_no_text(parse):
    assert parse(b"a\xffb\r\n", "--tool-call-parser", "hermes")[1]["content"] == "a\ufffdb\r\n"


def test_tools_that_are_offered(parse, tmp_path):
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([{"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}]))
    code, message, errors = parse(CALL, "--tool-call-parser", "hermes", "--tools", str(file))
    assert code == 0
    assert message["content"] == CALL
    assert errors[-1] == "not offered: f"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    file.write_text(json.dumps([{"type": "function", "function": {"name": "f", "parameters": schema}}]))
    text = "<tool_call>\n<function=f>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>"
    _, message, errors = parse(text, "--tool-call-parser", "qwen3_coder", "--tools", str(file))
    assert calls_of(message) == [("f", {"a": 3})]
    assert len(errors) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read tools from {}: [Errno 2]"),
        ("{}", "cannot read tools from {}: the file must be a list, got an object"),
        ("[", "cannot read tools from {}: the file is not valid JSON"),
        ('[{"type": "function"}]', "cannot read tools from {}: [0].function: this field is required"),
    ],
)
def test_files_that_are_no_tools(parse, tmp_path, text, message):
    file = tmp_path / "tools.json"
    if text is not None:
        file.write_text(text)
    code, out, errors = parse(CALL, "--tool-call-parser", "hermes", "--tools", str(file))
    assert (code, out) == (1, None)
    assert message.format(file) in errors[-1]


@pytest.mark.parametrize(
    ("prompt", "reasoning", "content"),
    [("<|user|>Hi<|assistant|><think>\n", "Hm.", "Yes."), ("<think>\n\n</think>\n\n", None, "Hm.\n</think>\n\nYes.")],
)
def test_what_the_prompt_ends_with(parse, prompt, reasoning, content):
    text = "Hm.\n</think>\n\nYes."
    _, message, _ = parse(text, "--reasoning-parser", "qwen3", "--prompt-ends-with", prompt)
    assert (message.get("reasoning"), message["content"]) == (reasoning, content)


def test_a_model(parse, model):
    path = model(KNOWN["qwen3_coder"].template())
    text = (
        "<think>\nHm.\n</think>\n\n<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"
    )
    code, message, errors = parse(text, path)
    assert code == 0
    assert message["reasoning"] == "Hm."
    assert calls_of(message) == [("f", {"a": "x"})]
    assert errors[0] == "tool calls: qwen3_coder, by marks of the chat template"


def test_a_model_in_no_table(parse, model):
    path = model(UNKNOWN["attributes"].template())
    code, message, errors = parse('<fns><fn name="f"><arg name="a">x</arg></fn></fns>', path)
    assert code == 0
    assert calls_of(message) == [("f", {"a": "x"})]
    assert errors[0] == "tool calls: as the chat template writes turns"


def test_a_model_that_says_how_it_is_read(parse, model):
    field = {"open": "<own>", "close": "</own>", "repeats": True, "content": "json"}
    field["transform"] = {"type": "function", "function": "{content}"}
    spec = {"start_anchor": "<|turn|>", "fields": {"content": {}, "tool_calls": field}}
    path = model(KNOWN["hermes"].template(), response_template=spec)
    _, message, errors = parse('<own>{"name": "f", "arguments": {}}</own>', path)
    assert calls_of(message) == [("f", {})]
    assert errors[0] == "tool calls: as the checkpoint's response_template says"


def test_models_prints_the_syntax(parse, model, capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    path = model(KNOWN["glm45"].template())
    assert cli.main(["models", path]) == 0
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()[-2:]]
    assert lines[0] == ["tool", "calls", "glm45, by marks of the chat template"]
    assert lines[1][0] == "reasoning"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing says how to read the answer: name a model, tool_call_parser or reasoning_parser"),
        (["--tool-call-parser", "none", "--reasoning-parser", "none"], "nothing says how to read the answer"),
        (["--tool-call-parser", "hermes", "--chunk", "0"], "chunk must be at least 1, not 0"),
        (["--tool-call-parser", "hermes", "--chat-template", "{{ 1 }}"], "chat_template needs a model"),
        (["/no/such/model"], "/no/such/model"),
    ],
)
def test_errors_are_one_line(parse, arguments, message):
    code, out, errors = parse("x", *arguments)
    assert (code, out) == (1, None)
    assert message in errors[-1]
    assert "Traceback" not in "".join(errors)
