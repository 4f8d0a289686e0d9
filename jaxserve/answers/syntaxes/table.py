"""The syntaxes of calls that are known by name: vLLM's names of parsers, so that its options can be used unchanged.

The first row is chosen whose `signs` a chat template contains, all of them (`choosing`): rows of marks that only one
syntax has come first, those of marks that many have, such as `<tool_call>`, last. Several rows of one name are forms of
one syntax; the first one whose signs the template contains is read and written, else the first. docs/syntaxes.md lists
the models that use each syntax, and the sources.
"""

# ruff: noqa: RUF001 (some marks are spelled with full-width bars)

from dataclasses import replace

from jaxserve.answers.syntaxes.syntax import Calls, Channels, Elements, Ids, Object, PythonCall, Tags, Wrapped

_PARAMETERS = Wrapped(arguments="parameters")
_JSON = Calls(arguments=Wrapped())
_LINES = replace(_JSON, separator="\n")
_LIST = replace(_JSON, is_list=True, separator=", ")
_OBJECT = Calls(arguments=Object())
_PYTHON = Calls(arguments=PythonCall(), is_list=True, separator=", ")
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
)


def _prefixed(name: str, section: str, *, blank: str = "") -> Calls:
    """Return calls between tags that all begin with a name and, after it, a blank or none."""
    tag = f"｜{name}｜{blank}"
    return Calls(
        arguments=Tags(
            key=(f'<{tag}parameter name="', '"'), value=('">', f"</{tag}parameter>\n"), text_flag=' string="'
        ),
        section=(f"<{tag}{section}>\n", f"</{tag}{section}>"),
        call=("", f"</{tag}invoke>\n"),
        name=(f'<{tag}invoke name="', '">\n'),
        tag_prefix=f"｜{name}｜",
        signs=(name, f"{blank}{section}>"),
    )


_FORMS: dict[str, Calls] = {
    "deepseek_v32": _prefixed("DSML", "function_calls"),
    "deepseek_v4": _prefixed("DSML", "tool_calls"),
    "deepseek_v41": _prefixed("DSML", "calls", blank=" "),
    "gigachat35": replace(_prefixed("GCML", "tool_calls"), signs=("｜GCML｜",)),
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
            has_entities=True,
        ),
        section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        call=("<|open|>call ", "<|close|>call<|sep|>"),
        name=('tool="', '" index="{index}"<|sep|>'),
        signs=("<|open|>", "<|sep|>"),
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
    ),
    "gpt_oss": Calls(arguments=Channels(), is_parallel=False, signs=("<|channel|>commentary",)),  # a call is the end
    "seed_oss": replace(
        _LINES,
        arguments=Tags(key=("<parameter=", ">"), value=("", "</parameter>\n")),
        call=("<seed:tool_call>\n", "</function>\n</seed:tool_call>"),
        name=("<function=", ">\n"),
        signs=("<seed:tool_call>",),
    ),
    "qwen3_coder": replace(
        _LINES,
        arguments=Tags(key=("<parameter=", ">\n"), value=("", "\n</parameter>\n")),
        call=("<tool_call>\n", "</function>\n</tool_call>"),
        name=("<function=", ">\n"),
        signs=("<tool_call>", "<function=", "<parameter="),
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
        signs=("<tool_calls>", "</arg_key><arg_value>"),
    ),
    "iquest_q1": Calls(
        arguments=Tags(key=("<arg_key>", "</arg_key>"), value=("<arg_value>", "</arg_value>")),
        call=("<iquest_tool_call>", "</iquest_tool_call>"),
        signs=("<iquest_tool_call>",),
    ),
    "glm47": Calls(
        arguments=Tags(key=("<arg_key>", "</arg_key>"), value=("<arg_value>", "</arg_value>")),
        call=("<tool_call>", "</tool_call>"),
        signs=("<tool_call>", "</arg_key><arg_value>"),
    ),
    "glm45": _GLM,
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
    "olmo3": replace(
        _LINES,
        arguments=PythonCall(),
        section=("<function_calls>", "</function_calls>"),
        signs=("<function_calls>", "<functions>"),
    ),
    "lfm2": replace(
        _PYTHON,
        section=("<|tool_call_start|>", "<|tool_call_end|>"),
        signs=("<|tool_", "_start|>"),
    ),
    "muse": Calls(
        arguments=Tags(key=('<atem:parameter name="', '">'), value=("", "</atem:parameter>\n")),
        call=("to={name}<|message|><atem:function_calls>\n", "</atem:invoke>\n</atem:function_calls>"),
        name=('<atem:invoke name="', '">\n'),
        separator="<|eom|><|start|>assistant ",
        no_names=("self", "user", "commentary", "developer"),
        signs=("<atem:function_calls>",),
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
    "solar_open": replace(
        _OBJECT,
        section=("<|tool_calls|>", ""),
        call=("<|tool_call:begin|>", "<|tool_call:end|>"),
        name=("{server}<|tool_call:name|>", "<|tool_call:args|>"),
        signs=("<|tool_call:begin|>",),
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
    "mirothinker": replace(
        _OBJECT,
        call=("<use_mcp_tool>\n", "\n</arguments>\n</use_mcp_tool>"),
        name=("<server_name>{server}</server_name>\n<tool_name>", "</tool_name>\n<arguments>\n"),
        separator="\n",
        signs=("<use_mcp_tool>", "<tool_name>"),
    ),
    "functionary_v3_2": replace(
        _OBJECT, section=(">>>", ""), name=("", "\n"), separator=">>>", is_bare=True, signs=(">>>all\\n",)
    ),
    "granite": replace(
        _LIST,
        section=("<|tool_call|>", ""),
        others=(("<tool_call>", ""),),
        signs=("<|tool_call|>", "<|start_of_role|>"),
    ),
    "granite-20b-fc": replace(_LINES, call=("<function_call> ", ""), signs=("<function_call> ",)),
    "phi4_mini_json": replace(_LIST, section=("functools", ""), signs=("functools[",)),
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
    "hyperclovax": replace(_LIST, section=(" -> tool/function_call\n", ""), signs=("-> tool/function_call",)),
    "nemotron_json": replace(_LIST, section=("<TOOLCALL>", "</TOOLCALL>"), signs=("<TOOLCALL>",)),
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
    "xlam": replace(_LIST, others=(("[TOOL_CALLS]", ""), ("<tool_call>", "</tool_call>")), is_bare=True),
    "ernie45": replace(_JSON, call=("<tool_call>\n", "\n</tool_call>\n"), signs=("<tool_call>", "<response>")),
    "hermes": replace(
        _LINES,
        call=("<tool_call>\n", "\n</tool_call>"),
        signs=("<tool_call>", "arguments", "</tool_call>"),
    ),
    "pythonic": replace(_PYTHON, is_bare=True, signs=("<|start_header_id|>", "[func_name1(")),
    "llama4_pythonic": replace(
        _PYTHON,
        section=("<|python_start|>", "<|python_end|>"),
        is_bare=True,
        signs=("<|header_start|>", "[func_name1("),
    ),
    "llama3_json": Calls(
        arguments=_PARAMETERS,
        section=("<|python_tag|>", ""),
        separator="; ",
        is_bare=True,
        is_parallel=False,
        signs=("<|start_header_id|>", '"parameters": '),
    ),  # the template refuses to show two
}
_FURTHER_FORMS = {
    "lfm2": replace(_FORMS["lfm2"], signs=("List of tools: [",)),  # LFM2.5, whose template shows no marks
    "mistral": replace(_LIST, section=("[TOOL_CALLS]", ""), ids=Ids.NINE, signs=("[TOOL_CALLS]",)),
    "cohere_command3": replace(
        _LIST,
        arguments=Wrapped(name="tool_name", arguments="parameters"),
        section=("Action:\n```json\n", "\n```"),
        signs=("Action:", "```json", "tool_name"),
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
# Further names for the same, some of them SGLang's.
_ALIASES = {
    "apertus": ("apertus2509",),
    "cohere_command3": ("cohere_command4",),
    "deepseek_v3": ("deepseekv3",),
    "deepseek_v31": ("deepseekv31",),
    "deepseek_v32": ("deepseekv32",),
    "deepseek_v4": ("deepseekv4",),
    "deepseek_v41": ("deepseekv41",),
    "glm45": ("glm", "spark", "spark25"),
    "glm47": ("glm53_flash", "ling3", "poolside_v1"),
    "gpt_oss": ("gpt-oss", "openai"),
    "hermes": ("granite4", "qwen", "qwen25", "qwen3_json", "trinity"),
    "hy_v3": ("hunyuan",),
    "hyperclovax": ("hyperclovax_seed_think_14b",),
    "internlm": ("interns1",),
    "llama3_json": ("llama3", "llama4_json"),
    "minimax_m2": ("minimax-m2",),
    "minimax_m3": ("minimax-m3",),
    "muse": ("muse_glimmer", "musespark1x"),
    "qwen3_coder": ("mimo", "nanbeige", "nemotron_v3", "qwen3_xml", "step3p5", "step5"),
}
TOOL_PARSERS |= {
    alias: tuple(replace(row, signs=()) for row in TOOL_PARSERS[name])
    for name, aliases in _ALIASES.items()
    for alias in aliases
}
