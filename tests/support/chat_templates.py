"""Small chat templates of our own, one per syntax: each writes an assistant's turn exactly as models of that syntax do.

The frame around the turns is the same in all of them; arguments come as objects, thoughts as `reasoning_content`.
"""

from typing import NamedTuple

# ruff: noqa: E501, RUF001 (a template is told in one piece, and some marks are spelled with full-width bars)

_FRAME = """
{%- for message in messages %}
    {{- '<|turn|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- if message.reasoning_content %}{{- @THOUGHTS@ }}{% endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {%- set name, args, id, index = call.function.name, call.function.arguments, call.id, loop.index0 %}
            {%- if loop.first %}{{- (@GAP@ if message.content else '') + @BEGIN@ }}{% endif -%}
            @CALL@
            {{- @END@ if loop.last else @BETWEEN@ }}
        {%- endfor %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- @PROMPT@ }}{% endif -%}
"""


class Written(NamedTuple):
    """What a model writes. `call` is jinja, in which `name`, `args`, `id` and `index` are those of one call."""

    call: str
    begin: str = ""
    between: str = ""
    end: str = ""
    gap: str = "\n"
    thoughts: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    prompt: str = ""

    def template(self) -> str:
        """Return the chat template."""
        opening, closing = self.thoughts
        texts = {
            "THOUGHTS": f"{opening!r} + message.reasoning_content + {closing!r}",
            "GAP": repr(self.gap),
            "BEGIN": repr(self.begin),
            "BETWEEN": repr(self.between),
            "END": repr(self.end),
            "PROMPT": repr(f"<|turn|>assistant\n{self.prompt}"),
            "CALL": self.call,
        }
        template = _FRAME
        for word, text in texts.items():
            template = template.replace(f"@{word}@", text)
        return template


_VALUE = "{{- value if value is string else value | tojson }}"


def _tagged(head: str, before: str, after_key: str, after: str, tail: str) -> str:
    """Return the jinja of a call whose arguments are between tags."""
    loop = f"{{%- for key, value in args.items() %}}{{{{- {before!r} + key + {after_key!r} }}}}{_VALUE}{{{{- {after!r} }}}}{{%- endfor -%}}"
    return f"{head}{loop}{{{{- {tail!r} }}}}"


def _dsml(invoke: str, parameter: str, end: str, tail: str) -> str:
    """Return the jinja of a call in DSML, whose arguments say whether they are texts."""
    flag = "('true' if value is string else 'false')"
    return (
        f"{{{{- '{invoke} name=\"' + name + '\">\\n' }}}}{{%- for key, value in args.items() %}}"
        f"{{{{- '{parameter} name=\"' + key + '\" string=\"' + {flag} + '\">' }}}}"
        f"{_VALUE}{{{{- {end!r} }}}}{{%- endfor -%}}{{{{- {tail!r} }}}}"
    )


_NAMED = "{{- '{\"name\": ' + name | tojson + ', \"arguments\": ' + args | tojson + '}' }}"
_LITERALS = "{{- (value | tojson).replace('true', 'True').replace('false', 'False').replace('null', 'None') }}"
_PYTHON = (
    "{{- name + '(' }}{%- for key, value in args.items() %}{{- ', ' if not loop.first }}{{- key + '=' }}"
    f"{_LITERALS}{{%- endfor -%}}{{{{- ')' }}}}"
)
_OWN_QUOTES = """
{%- macro spell(value) %}
    {%- if value is string %}{{- QUOTE + value + QUOTE }}
    {%- elif value is mapping %}
        {{- '{' }}{% for key, item in value.items() %}{{- ',' if not loop.first }}{{- key + ':' }}{{- spell(item) }}{% endfor %}{{- '}' }}
    {%- elif value is sequence %}
        {{- '[' }}{% for item in value %}{{- ',' if not loop.first }}{{- spell(item) }}{% endfor %}{{- ']' }}
    {%- else %}{{- value | tojson }}
    {%- endif %}
{%- endmacro -%}
"""


def _quoted(mark: str, quote: str, end: str) -> str:
    macro = _OWN_QUOTES.replace("QUOTE", repr(quote)).replace("\n", "")
    return f"{macro}{{{{- {mark!r} + name }}}}{{{{- spell(args) }}}}{{{{- {end!r} }}}}"


KNOWN = {
    "hermes": Written("{{- '<tool_call>\\n' }}" + _NAMED + "{{- '\\n</tool_call>' }}", between="\n"),
    "llama3_json": Written(
        "{{- '{\"name\": ' + name | tojson + ', \"parameters\": ' + args | tojson + '}' }}", between="; ", gap=""
    ),
    "pythonic": Written(_PYTHON, begin="[", between=", ", end="]", gap=""),
    "lfm2": Written(_PYTHON, begin="<|tool_call_start|>[", between=", ", end="]<|tool_call_end|>", gap=""),
    "olmo3": Written(_PYTHON, begin="<function_calls>", between="\n", end="</function_calls>", gap=""),
    "mistral list": Written(
        "{{- '{\"name\": ' + name | tojson + ', \"arguments\": ' + args | tojson + ', \"id\": ' + id | tojson + '}' }}",
        begin="[TOOL_CALLS][",
        between=", ",
        end="]",
        gap="",
        thoughts=("[THINK]", "[/THINK]"),
    ),
    "mistral": Written(
        "{{- '[TOOL_CALLS]' + name + '[ARGS]' + args | tojson }}", gap="", thoughts=("[THINK]", "[/THINK]")
    ),
    "deepseek_v3": Written(
        "{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + name + '\\n```json\\n' + args | tojson + '\\n```<｜tool▁call▁end｜>' }}",
        begin="<｜tool▁calls▁begin｜>",
        between="\n",
        end="<｜tool▁calls▁end｜>",
        gap="",
    ),
    "deepseek_v31": Written(
        "{{- '<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + args | tojson + '<｜tool▁call▁end｜>' }}",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
        gap="",
        thoughts=("<think>", "</think>"),
    ),
    "deepseek_v32": Written(
        _dsml("<｜DSML｜invoke", "<｜DSML｜parameter", "</｜DSML｜parameter>\n", "</｜DSML｜invoke>\n"),
        begin="\n\n<｜DSML｜function_calls>\n",
        end="</｜DSML｜function_calls>",
        gap="",
        thoughts=("<think>", "</think>"),
    ),
    "qwen3_coder": Written(
        _tagged(
            "{{- '<tool_call>\\n<function=' + name + '>\\n' }}",
            "<parameter=",
            ">\n",
            "\n</parameter>\n",
            "</function>\n</tool_call>",
        ),
        between="\n",
        gap="\n\n",
    ),
    "seed_oss": Written(
        _tagged(
            "{{- '<seed:tool_call>\\n<function=' + name + '>\\n' }}",
            "<parameter=",
            ">",
            "</parameter>\n",
            "</function>\n</seed:tool_call>",
        ),
        between="\n",
        thoughts=("<seed:think>", "</seed:think>\n"),
    ),
    "glm45": Written(
        _tagged(
            "{{- '<tool_call>' + name + '\\n' }}",
            "<arg_key>",
            "</arg_key>\n<arg_value>",
            "</arg_value>\n",
            "</tool_call>",
        ),
        between="\n",
        thoughts=("<think>", "</think>\n"),
    ),
    "glm47": Written(
        _tagged("{{- '<tool_call>' + name }}", "<arg_key>", "</arg_key><arg_value>", "</arg_value>", "</tool_call>"),
        gap="",
        thoughts=("<think>", "</think>"),
    ),
    "kimi_k2": Written(
        "{{- '<|tool_call_begin|>functions.' + name + ':' + index | string + '<|tool_call_argument_begin|>' + args | tojson + '<|tool_call_end|>' }}",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
        gap="",
        thoughts=("<think>", "</think>"),
    ),
    "minimax_m2": Written(
        _tagged("{{- '<invoke name=\"' + name + '\">\\n' }}", '<parameter name="', '">', "</parameter>\n", "</invoke>"),
        begin="<minimax:tool_call>\n",
        between="\n",
        end="\n</minimax:tool_call>",
        prompt="<think>\n",
    ),
    "gemma4": Written(
        _quoted("<|tool_call>call:", '<|"|>', "<tool_call|>"), gap="", thoughts=("<|channel>thought\n", "\n<channel|>")
    ),
    "functiongemma": Written(_quoted("<start_function_call>call:", "<escape>", "<end_function_call>"), gap=""),
    "granite": Written(_NAMED, begin="<|tool_call|>[", between=", ", end="]", gap=""),
    "phi4_mini_json": Written(_NAMED, begin="functools[", between=", ", end="]", gap=""),
    "xlam": Written(_NAMED, begin="[", between=", ", end="]", gap=""),
    "jamba": Written(_NAMED, begin="<tool_calls>[\n    ", between=",\n    ", end="\n]</tool_calls>", gap=""),
    "hunyuan_a13b": Written(
        _NAMED,
        begin="<tool_calls>[",
        between=", ",
        end="]</tool_calls>",
        gap="",
        thoughts=("<think>\n", "\n</think>\n"),
    ),
    "internlm": Written(
        "{{- '<|action_start|><|plugin|>\\n{\"name\": ' + name | tojson + ', \"parameters\": ' + args | tojson + '}<|action_end|>' }}",
        gap="",
    ),
    "apertus": Written(
        "{{- '{' + name | tojson + ': ' + args | tojson + '}' }}",
        begin="<|tools_prefix|>[",
        between=", ",
        end="]<|tools_suffix|>",
        gap="",
        thoughts=("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    "cohere_command3": Written(
        "{{- '{\"tool_call_id\": \"' + index | string + '\", \"tool_name\": ' + name | tojson + ', \"parameters\": ' + args | tojson + '}' }}",
        begin="<|START_ACTION|>[\n    ",
        between=",\n    ",
        end="\n]<|END_ACTION|>",
        gap="",
        thoughts=("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    "step3": Written(
        _tagged(
            "{{- '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"' + name + '\">' }}",
            '<steptml:parameter name="',
            '">',
            "</steptml:parameter>",
            "</steptml:invoke><｜tool_call_end｜>",
        ),
        begin="<｜tool_calls_begin｜>",
        end="<｜tool_calls_end｜>",
        gap="",
    ),
    "deepseek_v4": Written(
        _dsml("<｜DSML｜invoke", "<｜DSML｜parameter", "</｜DSML｜parameter>\n", "</｜DSML｜invoke>\n"),
        begin="\n\n<｜DSML｜tool_calls>\n",
        end="</｜DSML｜tool_calls>",
        gap="",
        thoughts=("<think>", "</think>"),
    ),
    "gigachat35": Written(
        _dsml("<｜GCML｜invoke", "<｜GCML｜parameter", "</｜GCML｜parameter>\n", "</｜GCML｜invoke>\n"),
        begin="<｜GCML｜tool_calls>\n",
        end="</｜GCML｜tool_calls>",
        thoughts=("<think>", "</think>"),
    ),
    "iquest_q1": Written(
        _tagged(
            "{{- '<iquest_tool_call>' + name }}",
            "<arg_key>",
            "</arg_key><arg_value>",
            "</arg_value>",
            "</iquest_tool_call>",
        ),
        gap="",
    ),
    "hy_v3": Written(
        _tagged(
            "{{- '<tool_call>' + name + '<tool_sep>\\n' }}",
            "<arg_key>",
            "</arg_key>\n<arg_value>",
            "</arg_value>\n",
            "</tool_call>",
        ),
        begin="<tool_calls>\n",
        between="\n",
        end="\n</tool_calls>",
        thoughts=("<think>", "</think>"),
    ),
    "hy_v4": Written(
        _tagged("{{- '<tool_call>' + name }}", "<arg_key>", "</arg_key><arg_value>", "</arg_value>", "</tool_call>"),
        begin="<tool_calls>",
        end="</tool_calls>",
        gap="",
        thoughts=("<think>", "</think>"),
    ),
    "dots": Written(
        _tagged("{{- '<invoke name=\"' + name + '\">\\n' }}", '<parameter name="', '">', "</parameter>\n", "</invoke>"),
        begin="<dots_function_call>\n",
        between="\n",
        end="\n</dots_function_call>",
    ),
    "k2_horizon": Written(
        _tagged(
            "{{- '<ifm|tool_call>' + name + '\\n' }}",
            "<ifm|arg_key>",
            "</ifm|arg_key><ifm|arg_value>",
            "</ifm|arg_value>\n",
            "</ifm|tool_call>",
        ),
        begin="<ifm|tool_calls>\n",
        between="\n",
        end="\n</ifm|tool_calls>",
        thoughts=("<ifm|think>", "</ifm|think>"),
    ),
    "nemotron_json": Written(_NAMED, begin="<TOOLCALL>[", between=", ", end="]</TOOLCALL>", gap=""),
    "longcat": Written("{{- '<longcat_tool_call>\\n' }}" + _NAMED + "{{- '\\n</longcat_tool_call>' }}", between="\n"),
}
"""Syntaxes that have a name, and that a template shows."""

_TYPE = (
    "('string' if value is string else 'boolean' if value is boolean else 'number' if value is number else 'object')"
)

MARKED = {
    "deepseek_v41": Written(
        _dsml("<｜DSML｜ invoke", "<｜DSML｜ parameter", "</｜DSML｜ parameter>\n", "</｜DSML｜ invoke>\n"),
        begin="\n\n<｜DSML｜ calls>\n",
        end="</｜DSML｜ calls>",
        gap="",
        thoughts=("<think>", "</think>"),
    ),
    "minicpm5": Written(
        _tagged("{{- '<function name=\"' + name + '\">' }}", '<param name="', '">', "</param>", "</function>"),
        between="\n",
    ),
    "minimax_m3": Written(
        "{{- ']<]minimax[>[<invoke name=\"' + name + '\">' }}{%- for key, value in args.items() %}"
        "{{- ']<]minimax[>[<' + key + '>' }}" + _VALUE + "{{- ']<]minimax[>[</' + key + '>' }}{%- endfor -%}"
        "{{- ']<]minimax[>[</invoke>\\n' }}",
        begin="]<]minimax[>[<tool_call>\n",
        end="]<]minimax[>[</tool_call>",
        thoughts=("<mm:think>", "</mm:think>"),
    ),
    "kimi_k3": Written(
        "{{- '<|open|>call tool=\"' + name + '\" index=\"' + (index + 1) | string + '\"<|sep|>' }}"
        "{%- for key, value in args.items() %}"
        "{{- '<|open|>argument key=\"' + key + '\" type=\"' + "
        + _TYPE
        + " + '\"<|sep|>' }}"
        + _VALUE
        + "{{- '<|close|>argument<|sep|>' }}{%- endfor -%}{{- '<|close|>call<|sep|>' }}",
        begin="<|open|>tools<|sep|>",
        end="<|close|>tools<|sep|><|close|>message<|sep|>",
        thoughts=("<|open|>think<|sep|>", "<|close|>think<|sep|><|open|>response<|sep|>"),
        gap="<|close|>response<|sep|>",
    ),
    "muse": Written(
        _tagged(
            "{{- 'to=' + name + '<|message|><atem:function_calls>\\n<atem:invoke name=\"' + name + '\">\\n' }}",
            '<atem:parameter name="',
            '">',
            "</atem:parameter>\n",
            "</atem:invoke>\n</atem:function_calls>",
        ),
        between="<|eom|><|start|>assistant ",
        thoughts=("to=self<|message|>", "<|eom|><|start|>assistant "),
        gap="<|eom|><|start|>assistant ",
    ),
    "plamo3": Written(
        "{{- '<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>' + name + '<|plamo:end_tool_name:plamo|>"
        "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>' + args | tojson + "
        "'<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>' }}",
        begin="<|plamo:begin_tool_requests:plamo|>",
        end="<|plamo:end_tool_requests:plamo|><|plamo:tag|>",
        thoughts=("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    ),
    "solar_open": Written(
        "{{- '<|tool_call:begin|>' + (id or 'a1b2c3d4e5') + '<|tool_call:name|>' + name + '<|tool_call:args|>'"
        " + args | tojson + '<|tool_call:end|>' }}",
        begin="<|tool_calls|>",
        thoughts=("<|think|>", "<|end|><|begin|>assistant<|content|>"),
        gap="<|end|><|begin|>assistant",
    ),
    "hyperclovax": Written(
        "{{- {'name': name, 'arguments': args} | tojson }}",
        begin=" -> tool/function_call\n[",
        between=", ",
        end="]<|im_end|>",
        thoughts=("/think\n", "<|im_end|>\n<|im_start|>assistant"),
        gap="<|im_end|>\n<|im_start|>assistant",
    ),
    "inkling": Written(
        "{{- '<|content_invoke_tool_json|>{\"name\": ' + name | tojson + ', \"args\": ' + args | tojson + '}<|end_message|>' }}",
        between="<|message_model|>",
        thoughts=("<|content_thinking|>", "<|end_message|><|message_model|><|content_text|>"),
        gap="<|end_message|><|message_model|>",
    ),
}
"""Syntaxes that have a name, and more in them than a template shows."""

UNKNOWN = {
    "object between marks": Written(
        "{{- '<|fn|>{\"tool\": ' + name | tojson + ', \"input\": ' + args | tojson + '}<|/fn|>' }}",
        thoughts=("<reflect>", "</reflect>\n"),
    ),
    "name and object between tags": Written(
        "{{- '<use_tool><tool>' + name + '</tool><input>' + args | tojson + '</input></use_tool>' }}",
        between="\n",
        thoughts=("[REASON]", "[/REASON]"),
    ),
    "name in a tag, object in it": Written(
        "{{- '<function=' + name + '>' + args | tojson + '</function>' }}", thoughts=("<|mind|>", "<|/mind|>")
    ),
    "list between tags": Written(
        _NAMED, begin="<calls>[", between=", ", end="]</calls>", thoughts=("Thought: ", "\nAnswer: ")
    ),
    "lines between tags": Written(_NAMED, begin="<calls>\n", between="\n", end="\n</calls>"),
    "attributes": Written(
        _tagged("{{- '<fn name=\"' + name + '\">' }}", '<arg name="', '">', "</arg>", "</fn>"),
        begin="<fns>",
        end="</fns>",
    ),
    "Python between marks": Written("{{- '<|call|>' }}" + _PYTHON + "{{- '<|/call|>' }}"),
    "quotes of its own": Written(_quoted("<|do|>", "<|q|>", "<|done|>")),
    "a word before the object": Written(
        "{{- 'TOOL ' + name + ' WITH ' + args | tojson + '\\n' }}", begin="<|tools|>", end="<|/tools|>"
    ),
}
"""Syntaxes that no table has."""
