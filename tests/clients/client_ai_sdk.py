"""@ai-sdk/openai-compatible and @ai-sdk/openai in its default mode, responses: run by node."""

from conftest import run_node


def test_ai_sdk(url):
    result = run_node("ai_sdk.cjs", url)
    for provider in ("compatible", "openai"):
        found = result[provider]
        assert found["whole"] == found["streamed"] != ""
        assert found["second"], "an answer to a conversation that has the first one"
        assert found["object"]["masts"] in range(1, 6)
        assert found["call"]["toolName"] == "sail"
        assert found["call"]["input"]["to"] in ("north", "south")
