"""openai-node: the package that `make clients` has put into .venv-clients/node, run by node."""

import json

from conftest import MODEL, run_node


def test_openai_node(url):
    result = run_node("openai_node.cjs", url)
    assert result["models"] == [MODEL]
    assert result["whole"] == result["streamed"] != ""
    assert result["call"]["name"] == "sail"
    assert json.loads(result["call"]["arguments"])["to"] in ("north", "south")
    assert isinstance(result["response"], str)
    assert result["events"][0] == "response.created"
    assert result["events"][-1] == "response.incomplete"
    assert result["embeddings"] == [192, 192]
    assert result["left"]
    assert result["error"] == ["BadRequestError", 400, "temperature"]
