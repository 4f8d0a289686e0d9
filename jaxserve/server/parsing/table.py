"""The syntaxes that are known by name: vLLM's names of parsers, so that its options can be taken over.

A row with `signs` is chosen by them where a chat template shows all of them (`model`). Several rows of one name are
forms of one syntax: any of them reads all, and the one whose signs the template shows is written.
"""

# ruff: noqa: RUF001 (some marks are spelled with full-width bars)

from jaxserve.server.parsing.syntax import (
    Calls,
    Channels,
    Ids,
    Object,
    Tags,
    Thoughts,
    Wrapped,
)

_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
_DSML = Tags(key=('<｜DSML｜parameter name="', '"'), text_flag=" string=", value=("", "</｜DSML｜parameter>\n"))

_PARAMETER = Tags(key=("<parameter=", ">\n"), value=("", "\n</parameter>\n"))

TOOL_PARSERS: dict[str, tuple[Calls, ...]] = {
    "hermes": (
        Calls(
            arguments=Wrapped(),
            call=("<tool_call>\n", "\n</tool_call>"),
            separator="\n",
            signs=("<tool_call>", '"arguments'),
            not_signs=("<function=", "<arg_key>", "<|tool_call|>", "<response>"),
            families="Hermes 2 Pro and 3, Qwen 2.5, Qwen 3, QwQ, Granite 4",
            source="templates",
        ),
    ),
    "llama3_json": (
        Calls(
            arguments=Wrapped(arguments="parameters"),
            section=("<|python_tag|>", ""),
            separator="; ",
            is_bare=True,
            is_parallel=False,  # the template refuses to show two
            signs=("<|start_header_id|>", '"parameters": '),
            not_signs=("<tool_call>",),
            families="Llama 3.1, 3.2, 3.3",
            source="templates; vLLM",
        ),
    ),
    "mistral": (
        Calls(
            arguments=Object(),
            call=("[TOOL_CALLS]", ""),
            name=("", "[ARGS]"),
            ids=Ids.NINE,
            signs=("[TOOL_CALLS]", "[ARGS]"),
            families="Mistral Small 3.1 and later, Devstral, Magistral, Ministral 3",
            source="templates",
        ),
        Calls(
            arguments=Wrapped(),
            section=("[TOOL_CALLS]", ""),
            separator=", ",
            is_list=True,
            ids=Ids.NINE,
            signs=("[TOOL_CALLS]",),
            not_signs=("[ARGS]",),
            families="Mistral 7B v0.3, Nemo, Small 2409",
            source="templates",
        ),
    ),
    "deepseek_v3": (
        Calls(
            arguments=Object(),
            section=_DEEPSEEK,
            call=(_DEEPSEEK_CALL, "\n```<｜tool▁call▁end｜>"),
            name=("function<｜tool▁sep｜>", "\n```json\n"),
            separator="\n",
            signs=(_DEEPSEEK[0], "```json"),
            families="DeepSeek V3, V3-0324, R1",
            source="templates",
        ),
    ),
    "deepseek_v31": (
        Calls(
            arguments=Object(),
            section=_DEEPSEEK,
            call=(_DEEPSEEK_CALL, "<｜tool▁call▁end｜>"),
            name=("", "<｜tool▁sep｜>"),
            signs=(_DEEPSEEK[0],),
            not_signs=("```json",),
            families="DeepSeek V3.1",
            source="template",
        ),
    ),
    "gpt_oss": (
        Calls(
            arguments=Channels(),
            is_parallel=False,  # a call ends the answer
            signs=("<|channel|>commentary",),
            families="gpt-oss",
            source="template",
        ),
    ),
    "qwen3_coder": (
        Calls(
            arguments=_PARAMETER,
            call=("<tool_call>\n", "</function>\n</tool_call>"),
            name=("<function=", ">\n"),
            separator="\n",
            signs=("<tool_call>", "<function=", "<parameter="),
            not_signs=("<seed:tool_call>",),
            families="Qwen3-Coder, Qwen 3.5, Nemotron 3, MiMo V2, Step 3.5",
            source="templates",
        ),
    ),
    "glm45": (
        Calls(
            arguments=Tags(key=("<arg_key>", "</arg_key>\n"), value=("<arg_value>", "</arg_value>\n")),
            call=("<tool_call>", "</tool_call>"),
            name=("", "\n"),
            separator="\n",
            signs=("<tool_call>", "<arg_key>", "<arg_value>"),
            families="GLM 4.5, 4.6",
            source="template",
        ),
    ),
}

REASONING_PARSERS: dict[str, Thoughts] = {
    "deepseek_r1": Thoughts(families="DeepSeek R1 and its distillations", source="template"),
    "qwen3": Thoughts(
        opening=("<think>\n",),
        closing=("\n</think>\n\n",),
        signs=("</think>",),
        not_signs=("<response>", "<arg_key>"),
        families="Qwen 3, QwQ, DeepSeek V3.1",
        source="templates",
    ),
    "glm45": Thoughts(
        reopens=True,
        signs=("</think>", "<arg_key>"),
        families="GLM 4.5, 4.6, 4.7",
        source="templates",
    ),
    "gpt_oss": Thoughts(opening=(), closing=(), signs=("<|channel|>analysis",), families="gpt-oss", source="template"),
}
