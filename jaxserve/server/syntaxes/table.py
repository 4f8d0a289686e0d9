"""The syntaxes of calls that are known by name: vLLM's names of parsers, so that its options can be used unchanged.

A row is chosen by its `signs` if a chat template contains all of them (`choosing`). Several rows of one name are forms
of one syntax; the one whose signs the template contains is read and written, else the first. docs/syntaxes.md lists the
models that use each syntax, and the sources.
"""

# ruff: noqa: RUF001 (some marks are spelled with full-width bars)

from dataclasses import replace

from jaxserve.server.syntaxes.syntax import Calls, Channels, Elements, Ids, Object, PythonCall, Tags, Wrapped

_PARAMETERS = Wrapped(arguments="parameters")
_JSON = Calls(arguments=Wrapped())
_LINES = replace(_JSON, separator="\n")
_LIST = replace(_JSON, is_list=True, separator=", ")
_OBJECT = Calls(arguments=Object())
_PYTHON = Calls(arguments=PythonCall(), is_list=True, separator=", ")
_DSML = Calls(
    arguments=Tags(
        key=('<｜DSML｜parameter name="', '"'), value=('">', "</｜DSML｜parameter>\n"), text_flag=' string="'
    ),
    call=("", "</｜DSML｜invoke>\n"),
    name=('<｜DSML｜invoke name="', '">\n'),
)
_INVOKE = Calls(
    arguments=Tags(key=('<parameter name="', '">'), value=("", "</parameter>\n")),
    call=("", "</invoke>\n"),
    name=('<invoke name="', '">\n'),
)
_GLM = Calls(
    arguments=Tags(key=("<arg_key>", "</arg_key>\n"), value=("<arg_value>", "</arg_value>\n")),
    call=("<tool_call>", "</tool_call>"),
    name=("", "\n"),
    separator="\n",
    signs=("<tool_call>", "<arg_key>", "<arg_value>"),
    not_signs=("</arg_key><arg_value>", "<tool_sep>"),
)

_FORMS: dict[str, Calls] = {
    "hermes": replace(
        _LINES,
        call=("<tool_call>\n", "\n</tool_call>"),
        signs=("<tool_call>", "arguments", "</tool_call>"),
        not_signs=(
            "<function=",
            "<arg_key>",
            "<|tool_call|>",
            "<response>",
            "<longcat",
            "<seed:",
            "<tool_calls>",
            "minimax[>",
        ),
    ),
    "llama3_json": Calls(
        arguments=_PARAMETERS,
        section=("<|python_tag|>", ""),
        separator="; ",
        is_bare=True,
        is_parallel=False,
        signs=("<|start_header_id|>", '"parameters": '),
        not_signs=("<tool_call>", "[func_name1("),
    ),  # the template refuses to show two
    "pythonic": replace(_PYTHON, is_bare=True, signs=("<|start_header_id|>", "[func_name1(")),
    "llama4_pythonic": replace(
        _PYTHON,
        section=("<|python_start|>", "<|python_end|>"),
        is_bare=True,
        signs=("<|header_start|>", "[func_name1("),
    ),
    "lfm2": replace(
        _PYTHON,
        section=("<|tool_call_start|>", "<|tool_call_end|>"),
        signs=("<|tool_", "_start|>"),
        not_signs=("<|tool_calls_section",),
    ),
    "olmo3": replace(
        _LINES,
        arguments=PythonCall(),
        section=("<function_calls>", "</function_calls>"),
        signs=("<function_calls>",),
        not_signs=("<invoke", "DSML"),
    ),
    "mistral": replace(
        _OBJECT, call=("[TOOL_CALLS]", ""), name=("", "[ARGS]"), ids=Ids.NINE, signs=("[TOOL_CALLS]", "[ARGS]")
    ),
    "deepseek_v3": replace(
        _OBJECT,
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        call=("<｜tool▁call▁begin｜>", "\n```<｜tool▁call▁end｜>"),
        name=("function<｜tool▁sep｜>", "\n```json\n"),
        separator="\n",
        signs=("<｜tool▁calls▁begin｜>", "```json"),
    ),
    "deepseek_v31": replace(
        _OBJECT,
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        name=("", "<｜tool▁sep｜>"),
        signs=("<｜tool▁calls▁begin｜>",),
        not_signs=("```json",),
    ),
    "deepseek_v32": replace(
        _DSML, section=("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"), signs=("DSML", "function_calls>")
    ),
    "deepseek_v4": replace(
        _DSML, section=("<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"), signs=("DSML", "tool_calls>")
    ),
    "deepseek_v41": Calls(
        arguments=Tags(
            key=('<｜DSML｜ parameter name="', '"'), value=('">', "</｜DSML｜ parameter>\n"), text_flag=' string="'
        ),
        section=("<｜DSML｜ calls>\n", "</｜DSML｜ calls>"),
        call=("", "</｜DSML｜ invoke>\n"),
        name=('<｜DSML｜ invoke name="', '">\n'),
        signs=("DSML", " calls>"),
    ),
    "gpt_oss": Calls(arguments=Channels(), is_parallel=False, signs=("<|channel|>commentary",)),  # a call is the end
    "qwen3_coder": replace(
        _LINES,
        arguments=Tags(key=("<parameter=", ">\n"), value=("", "\n</parameter>\n")),
        call=("<tool_call>\n", "</function>\n</tool_call>"),
        name=("<function=", ">\n"),
        signs=("<tool_call>", "<function=", "<parameter="),
        not_signs=("<seed:tool_call>",),
    ),
    "seed_oss": replace(
        _LINES,
        arguments=Tags(key=("<parameter=", ">"), value=("", "</parameter>\n")),
        call=("<seed:tool_call>\n", "</function>\n</seed:tool_call>"),
        name=("<function=", ">\n"),
        signs=("<seed:tool_call>",),
    ),
    "glm45": _GLM,
    "glm47": Calls(
        arguments=Tags(key=("<arg_key>", "</arg_key>"), value=("<arg_value>", "</arg_value>")),
        call=("<tool_call>", "</tool_call>"),
        signs=("<tool_call>", "</arg_key><arg_value>"),
    ),
    "minimax_m2": replace(
        _INVOKE, section=("<minimax:tool_call>\n", "</minimax:tool_call>"), signs=("<minimax:tool_call>",)
    ),
    "minimax_m3": Calls(
        arguments=Elements(mark="]<]minimax[>["),
        section=("]<]minimax[>[<tool_call>\n", "]<]minimax[>[</tool_call>"),
        call=("", "]<]minimax[>[</invoke>\n"),
        name=(']<]minimax[>[<invoke name="', '">'),
        signs=("]<]minimax[>[",),
    ),
    "dots": replace(
        _INVOKE, section=("<dots_function_call>\n", "</dots_function_call>"), signs=("<dots_function_call>",)
    ),
    "muse": Calls(
        arguments=Tags(key=('<atem:parameter name="', '">'), value=("", "</atem:parameter>\n")),
        call=("to={name}<|message|><atem:function_calls>\n", "</atem:invoke>\n</atem:function_calls>"),
        name=('<atem:invoke name="', '">\n'),
        separator="<|eom|><|start|>assistant ",
        signs=("<atem:function_calls>",),
    ),
    "hy_v3": Calls(
        arguments=Tags(key=("<arg_key>", "</arg_key>\n"), value=("<arg_value>", "</arg_value>\n")),
        section=("<tool_calls>\n", "\n</tool_calls>"),
        call=("<tool_call>", "</tool_call>"),
        name=("", "<tool_sep>\n"),
        separator="\n",
        signs=("<tool_calls>", "<tool_sep>"),
    ),
    "hy_v4": Calls(
        arguments=Tags(key=("<arg_key>", "</arg_key>"), value=("<arg_value>", "</arg_value>")),
        section=("<tool_calls>", "</tool_calls>"),
        call=("<tool_call>", "</tool_call>"),
    ),
    "k2_horizon": Calls(
        arguments=Tags(key=("<ifm|arg_key>", "</ifm|arg_key>"), value=("<ifm|arg_value>", "</ifm|arg_value>\n")),
        section=("<ifm|tool_calls>\n", "</ifm|tool_calls>"),
        call=("<ifm|tool_call>", "</ifm|tool_call>\n"),
        name=("", "\n"),
        signs=("<ifm|tool_calls>",),
    ),
    "minicpm5": Calls(
        arguments=Tags(key=('<param name="', '">'), value=("", "</param>"), has_cdata=True),
        call=("", "</function>"),
        name=('<function name="', '">'),
        separator="\n",
        signs=('<function name="', '<param name="'),
    ),
    "step3": Calls(
        arguments=Tags(key=('<steptml:parameter name="', '">'), value=("", "</steptml:parameter>\n")),
        section=("<｜tool_calls_begin｜>\n", "<｜tool_calls_end｜>"),
        call=("<｜tool_call_begin｜>", "</steptml:invoke><｜tool_call_end｜>\n"),
        name=('function<｜tool_sep｜><steptml:invoke name="', '">\n'),
        signs=("<｜tool_calls_begin｜>",),
    ),
    "kimi_k2": replace(
        _OBJECT,
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        call=("<|tool_call_begin|>", "<|tool_call_end|>"),
        name=("functions.", ":{index}<|tool_call_argument_begin|>"),
        ids=Ids.NUMBERED,
        signs=("<|tool_calls_section_begin|>",),
    ),
    "kimi_k3": Calls(
        arguments=Tags(
            key=('<|open|>argument key="', '"'),
            value=('"<|sep|>', "<|close|>argument<|sep|>"),
            text_flag=' type="',
            flags=("string", "number", "boolean", "object", "array", "null"),
        ),
        section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        call=("<|open|>call ", "<|close|>call<|sep|>"),
        name=('tool="', '" index="{index}"<|sep|>'),
        signs=("<|open|>", "<|sep|>"),
    ),
    "plamo3": replace(
        _OBJECT,
        section=("<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>"),
        call=(
            "<|plamo:begin_tool_request:plamo|>",
            "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
        ),
        name=(
            "<|plamo:begin_tool_name:plamo|>",
            "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>",
        ),
        signs=("<|plamo:begin_tool_requests:plamo|>",),
    ),
    "gemma4": Calls(
        arguments=Object(quote='<|"|>'),
        call=("<|tool_call>", "<tool_call|>"),
        name=("call:", ""),
        signs=("<|tool_call>", "<tool_call|>"),
    ),
    "functiongemma": Calls(
        arguments=Object(quote="<escape>"),
        call=("<start_function_call>", "<end_function_call>"),
        name=("call:", ""),
        signs=("<start_function_call>",),
    ),
    "granite": replace(
        _LIST,
        section=("<|tool_call|>", ""),
        others=(("<tool_call>", ""),),
        signs=("<|tool_call|>", "<|start_of_role|>", "'assistant_tool_call'"),
    ),
    "granite-20b-fc": replace(_LINES, call=("<function_call> ", ""), signs=("<function_call> ",)),
    "phi4_mini_json": replace(_LIST, section=("functools", ""), signs=("functools[",)),
    "xlam": replace(_LIST, others=(("[TOOL_CALLS]", ""), ("<tool_call>", "</tool_call>")), is_bare=True),
    "cohere_command3": replace(
        _LIST,
        arguments=Wrapped(name="tool_name", arguments="parameters", id="tool_call_id"),
        section=("<|START_ACTION|>", "<|END_ACTION|>"),
        signs=("<|START_ACTION|>",),
    ),
    "hunyuan_a13b": replace(_LIST, section=("<tool_calls>", "</tool_calls>"), signs=("<tool_calls>[", "<answer>")),
    "jamba": replace(_LIST, section=("<tool_calls>", "</tool_calls>"), signs=("<tool_calls>", "<|bom|>")),
    "minimax": replace(
        _LINES, section=("<tool_calls>\n", "\n</tool_calls>"), signs=("<tool_calls>\n", "<beginning_of_sentence>")
    ),
    "nemotron_json": replace(_LIST, section=("<TOOLCALL>", "</TOOLCALL>"), signs=("<TOOLCALL>",)),
    "ernie45": replace(
        _JSON, call=("<tool_call>\n", "\n</tool_call>\n"), signs=("<tool_call>", "<response>"), not_signs=("<invoke",)
    ),
    "internlm": Calls(
        arguments=_PARAMETERS, call=("<|action_start|><|plugin|>\n", "<|action_end|>"), signs=("<|action_start|>",)
    ),
    "apertus": replace(
        _LIST, arguments=Wrapped(name=""), section=("<|tools_prefix|>", "<|tools_suffix|>"), signs=("<|tools_prefix|>",)
    ),
    "longcat": replace(
        _LINES, call=("<longcat_tool_call>\n", "\n</longcat_tool_call>"), signs=("<longcat_tool_call>",)
    ),
    "inkling": Calls(
        arguments=Wrapped(arguments="args"),
        call=("<|content_invoke_tool_json|>", "<|end_message|>"),
        separator="<|message_model|>",
        signs=("<|content_invoke_tool_json|>",),
    ),
    "gigachat3": replace(_JSON, call=("<|function_call|>", ""), signs=("<|function_call|>",)),
}
_FURTHER_FORMS = {
    "mistral": replace(
        _LIST, section=("[TOOL_CALLS]", ""), ids=Ids.NINE, signs=("[TOOL_CALLS]",), not_signs=("[ARGS]",)
    ),
    "cohere_command3": replace(
        _LIST,
        arguments=Wrapped(name="tool_name", arguments="parameters"),
        section=("Action:\n```json\n", "\n```"),
        signs=("Action:", "```json", "tool_name"),
        not_signs=("<|START_ACTION|>",),
    ),
    "gigachat3": replace(
        _JSON,
        others=(("<|function_call|>", ""),),
        call=("function call<|role_sep|>\n", ""),
        is_parallel=False,
        signs=("'function call'", "role_sep"),
    ),
}

TOOL_PARSERS: dict[str, tuple[Calls, ...]] = {
    name: (form, *filter(None, [_FURTHER_FORMS.get(name)])) for name, form in _FORMS.items()
}
# Further names for the same.
TOOL_PARSERS |= {
    alias: tuple(replace(row, signs=()) for row in TOOL_PARSERS[name])
    for alias, name in (
        ("openai", "gpt_oss"),
        ("qwen3_xml", "qwen3_coder"),
        ("nemotron_v3", "qwen3_coder"),
        ("mimo", "qwen3_coder"),
        ("step3p5", "qwen3_coder"),
        ("step5", "qwen3_coder"),
        ("granite4", "hermes"),
        ("qwen3_json", "hermes"),
        ("ling3", "glm47"),
        ("poolside_v1", "glm47"),
        ("muse_glimmer", "muse"),
        ("musespark1x", "muse"),
        ("llama4_json", "llama3_json"),
        ("cohere_command4", "cohere_command3"),
    )
}
