"""The syntaxes of thoughts that are known by name: vLLM's names of parsers. As in `table`, the first row is chosen
whose signs a chat template has.
"""

from dataclasses import replace

from jaxserve.answers.syntaxes.syntax import Thoughts

_MUSE = Thoughts(
    opening=("to=self<|message|>", "<|message|>"),
    closing=("<|eom|>", "<|eot|>", "<|start|>assistant "),
    answer=("to=user<|message|>", "<|eot|>"),
    reopens=True,
    channels=("to={name}<|message|>",),
    dropped=("to=developer<|message|>",),
    hidden=("<|start|>assistant ", "to={name}<|message|>", "<|message|>", "<|eom|>", "<|eot|>"),
    signs=("to=self<|message|>", "<atem:"),
)

# fmt: off
REASONING_PARSERS: dict[str, Thoughts] = {
    "deepseek_v3": Thoughts(signs=("</think>", "DSML")),
    "olmo3": Thoughts(signs=("<think>", "<function_calls>")),
    "glm45": Thoughts(reopens=True, signs=("</think>", "<arg_key>")),
    "kimi_k2": Thoughts(opening=("<think>", "◁think▷"), closing=("</think>", "◁/think▷"), reopens=True,
        signs=("</think>", "<|tool_calls_section_begin|>")),
    "minimax_m2": Thoughts(opening=("<think>\n",), closing=("\n</think>\n\n",), reopens=True, starts_open=True,
        signs=("</think>", "<minimax:tool_call>")),
    "mistral": Thoughts(opening=("[THINK]",), closing=("[/THINK]",), calls_end=False, signs=("[THINK]",)),
    "gemma4": Thoughts(opening=("<|channel>thought\n", "<|channel><|channel>thought"), closing=("\n<channel|>",),
        reopens=True, hidden=("<channel|>",), signs=("<|channel>thought",)),
    "seed_oss": Thoughts(opening=("<seed:think>",), closing=("</seed:think>",), signs=("<seed:think>",)),
    "apertus": Thoughts(opening=("<|inner_prefix|>",), closing=("<|inner_suffix|>",), reopens=True,
        signs=("<|inner_prefix|>",)),
    "minimax_m3": Thoughts(opening=("<mm:think>",), closing=("</mm:think>",), reopens=True,
        signs=("<mm:think>", "]<]minimax[>[")),
    "kimi_k3": Thoughts(opening=("<|open|>think<|sep|>",), closing=("<|close|>think<|sep|>", "<|open|>response<|sep|>"),
        answer=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        hidden=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        signs=("<|open|>", "<|sep|>")),
    "k2_horizon": Thoughts(opening=("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
        closing=("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"), signs=("<ifm|think>",)),
    "plamo3": Thoughts(opening=("<|plamo:begin_think:plamo|>",), closing=("<|plamo:end_think:plamo|>",), reopens=True,
        hidden=("<|plamo:end_think:plamo|>", "<|plamo:tag|>"), signs=("<|plamo:begin_think:plamo|>",)),
    "muse": _MUSE,
    "muse_glimmer": replace(_MUSE, opening=_MUSE.opening[:1], channels=(*_MUSE.channels, "<|message|>"), signs=()),
    "inkling": Thoughts(opening=("<|content_thinking|>",), closing=("<|end_message|>",),
        answer=("<|content_text|>", "<|end_message|>"), reopens=True,
        hidden=("<|message_model|>", "<|content_text|>", "<|end_message|>", "<|content_model_end_sampling|>"),
        signs=("<|content_thinking|>",)),
    "solar_open": Thoughts(opening=("<|think|>",), closing=("<|end|>",), answer=("<|content|>", "<|end|>"),
        reopens=True, hidden=("<|begin|>assistant", "<|content|>", "<|end|>", "<|calls|>", "<|flush|>"),
        signs=("<|think|>", "<|tool_call:begin|>")),
    "hyperclovax": Thoughts(opening=("/think\n",), closing=("<|im_end|>\n<|im_start|>assistant",), lead="\n",
        hidden=("<|im_end|>\n<|im_start|>assistant", "<|im_start|>assistant", "<|im_end|>"),
        signs=("-> tool/function_call", "/think")),
    "gpt_oss": Thoughts(opening=(), closing=(), signs=("<|channel|>analysis",)),
    "cohere_command4": Thoughts(opening=("<|START_THINKING|>",), closing=("<|END_THINKING|>",),
        answer=("<|START_TEXT|>", "<|END_TEXT|>"), hidden=("<co>",), signs=("<|START_THINKING|>", "<|START_TEXT|>")),
    "cohere_command3": Thoughts(opening=("<|START_THINKING|>",), closing=("<|END_THINKING|>",),
        answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"), hidden=("<co>",), signs=("<|START_THINKING|>",)),
    "hunyuan_a13b": Thoughts(opening=("<think>\n",), closing=("\n</think>\n",), answer=("<answer>\n", "\n</answer>"),
        calls_end=False, signs=("</think>", "<answer>")),
    "ernie45": Thoughts(opening=("<think>\n",), closing=("\n</think>\n\n",), answer=("<response>\n", "\n</response>\n"),
        starts_open=True, signs=("</think>", "<response>", "<tool_call>")),
    "granite": Thoughts(opening=("Here is my thought process:", "Here's my thought process:", "<think>"),
        closing=("Here is my response:", "Here's my response:", "</think>"), answer=("<response>", "</response>"),
        signs=("<|start_of_role|>", "thought", "<|tool_call|>")),
    # No thoughts: words are a message to a recipient, `>>>all`, whose first mark is the end of the prompt.
    "functionary_v3_2": Thoughts(opening=(), closing=(), lead="all\n", hidden=(">>>all\n",), signs=(">>>all\\n",)),
    "minimax_m2_append_think": Thoughts(starts_open=True, stay=True),
    "step3": Thoughts(starts_open=True),
    "deepseek_r1": Thoughts(),
    "qwen3": Thoughts(opening=("<think>\n",), closing=("\n</think>\n\n",), signs=("</think>",)),
}
# Further names for the same, some of them SGLang's.
_ALIASES = {
    "deepseek_r1": ("deepseek-r1", "gigachat35", "hunyuan", "hy_v3", "hy_v4", "iquest_q1", "step5"),
    "deepseek_v3": ("deepseek-v3", "deepseek-v4", "deepseek-v41", "deepseek_v4", "deepseek_v41"),
    "glm45": ("glm47", "glm53_flash", "ling3"),
    "gpt_oss": ("gpt-oss", "openai_gptoss"),
    "hyperclovax": ("hyperclovax_seed_think_14b",),
    "kimi_k2": ("kimi",),
    "minimax_m2": ("minimax",),
    "minimax_m2_append_think": ("minimax-append-think",),
    "minimax_m3": ("minimax-m3",),
    "muse": ("musespark1x",),
    "qwen3": (
        "dots", "granite_thinking_parser", "holo2", "interns1", "mimo", "minicpmv", "nanbeige", "nemotron_3",
        "nemotron_v3", "poolside_v1", "qwen3-thinking", "step3p5",
    ),
}
# fmt: on
REASONING_PARSERS |= {
    alias: replace(REASONING_PARSERS[name], signs=()) for name, aliases in _ALIASES.items() for alias in aliases
}
