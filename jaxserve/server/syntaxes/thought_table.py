"""The syntaxes of thoughts that are known by name: vLLM's names of parsers, chosen as those of calls are (`table`)."""

from dataclasses import replace

from jaxserve.server.syntaxes.syntax import Thoughts

REASONING_PARSERS: dict[str, Thoughts] = {
    "deepseek_r1": Thoughts(),
    "qwen3": Thoughts(
        opening=("<think>\n",),
        closing=("\n</think>\n\n",),
        signs=("</think>",),
        not_signs=(
            "<response>",
            "<arg_key>",
            "<|tool_calls_section",
            "<minimax:",
            "<answer>",
            "[THINK]",
            "function_calls>",
            "DSML",
        ),
    ),
    "glm45": Thoughts(reopens=True, signs=("</think>", "<arg_key>")),
    "kimi_k2": Thoughts(
        opening=("<think>", "◁think▷"),
        closing=("</think>", "◁/think▷"),
        reopens=True,
        signs=("</think>", "<|tool_calls_section_begin|>"),
    ),
    "olmo3": Thoughts(signs=("<think>", "<function_calls>"), not_signs=("DSML",)),
    "deepseek_v3": Thoughts(signs=("</think>", "DSML")),
    "minimax_m2": Thoughts(
        opening=("<think>\n",),
        closing=("\n</think>\n\n",),
        reopens=True,
        starts_open=True,
        signs=("</think>", "<minimax:tool_call>"),
    ),
    "minimax_m2_append_think": Thoughts(starts_open=True, stay=True),
    "step3": Thoughts(starts_open=True),
    "granite": Thoughts(
        opening=("Here is my thought process:", "Here's my thought process:", "<think>"),
        closing=("Here is my response:", "Here's my response:", "</think>"),
        answer=("<response>", "</response>"),
        signs=("<|start_of_role|>", "thought"),
        not_signs=("<tool_call>",),
    ),
    "cohere_command3": Thoughts(
        opening=("<|START_THINKING|>",),
        closing=("<|END_THINKING|>",),
        answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        hidden=("<co>",),
        signs=("<|START_THINKING|>",),
        not_signs=("<|START_TEXT|>",),
    ),
    "cohere_command4": Thoughts(
        opening=("<|START_THINKING|>",),
        closing=("<|END_THINKING|>",),
        answer=("<|START_TEXT|>", "<|END_TEXT|>"),
        hidden=("<co>",),
        signs=("<|START_THINKING|>", "<|START_TEXT|>"),
    ),
    "mistral": Thoughts(opening=("[THINK]",), closing=("[/THINK]",), calls_end=False, signs=("[THINK]",)),
    "gemma4": Thoughts(
        opening=("<|channel>thought\n", "<|channel><|channel>thought"),
        closing=("\n<channel|>",),
        reopens=True,
        hidden=("<channel|>",),
        signs=("<|channel>thought",),
    ),
    "seed_oss": Thoughts(opening=("<seed:think>",), closing=("</seed:think>",), signs=("<seed:think>",)),
    "apertus": Thoughts(
        opening=("<|inner_prefix|>",), closing=("<|inner_suffix|>",), reopens=True, signs=("<|inner_prefix|>",)
    ),
    "hunyuan_a13b": Thoughts(
        opening=("<think>\n",),
        closing=("\n</think>\n",),
        answer=("<answer>\n", "\n</answer>"),
        calls_end=False,
        signs=("</think>", "<answer>"),
    ),
    "ernie45": Thoughts(
        opening=("<think>\n",),
        closing=("\n</think>\n\n",),
        answer=("<response>\n", "\n</response>\n"),
        starts_open=True,
        signs=("</think>", "<response>", "<tool_call>"),
    ),
    "minimax_m3": Thoughts(
        opening=("<mm:think>",), closing=("</mm:think>",), reopens=True, signs=("<mm:think>", "]<]minimax[>[")
    ),
    "kimi_k3": Thoughts(
        opening=("<|open|>think<|sep|>",),
        closing=("<|close|>think<|sep|>", "<|open|>response<|sep|>"),
        answer=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        hidden=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        signs=("<|open|>", "<|sep|>"),
    ),
    "k2_horizon": Thoughts(
        opening=("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
        closing=("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
        signs=("<ifm|think>",),
    ),
    "plamo3": Thoughts(
        opening=("<|plamo:begin_think:plamo|>",),
        closing=("<|plamo:end_think:plamo|>",),
        reopens=True,
        hidden=("<|plamo:end_think:plamo|>", "<|plamo:tag|>"),
        signs=("<|plamo:begin_think:plamo|>",),
    ),
    "muse": Thoughts(
        opening=("to=self<|message|>",),
        closing=("<|eom|>",),
        answer=("to=user<|message|>", "<|eot|>"),
        calls_end=False,
        reopens=True,
        hidden=("<|start|>assistant", "to=user<|message|>", "to=commentary<|message|>", "<|eom|>", "<|eot|>"),
        signs=("to=self<|message|>", "<atem:"),
    ),
    "inkling": Thoughts(
        opening=("<|content_thinking|>",),
        closing=("<|end_message|>",),
        answer=("<|content_text|>", "<|end_message|>"),
        reopens=True,
        hidden=("<|message_model|>", "<|content_text|>", "<|end_message|>", "<|content_model_end_sampling|>"),
        signs=("<|content_thinking|>",),
    ),
    "gpt_oss": Thoughts(opening=(), closing=(), signs=("<|channel|>analysis",)),
}
# Further names for the same.
REASONING_PARSERS |= {
    alias: replace(REASONING_PARSERS[name], signs=())
    for alias, name in (
        ("openai_gptoss", "gpt_oss"),
        ("nemotron_v3", "qwen3"),
        ("holo2", "qwen3"),
        ("step3p5", "qwen3"),
        ("mimo", "qwen3"),
        ("minicpmv", "qwen3"),
        ("poolside_v1", "qwen3"),
        ("granite_thinking_parser", "qwen3"),
        ("step5", "deepseek_r1"),
        ("hy_v3", "deepseek_r1"),
        ("hy_v4", "deepseek_r1"),
        ("deepseek_v4", "deepseek_v3"),
        ("deepseek_v41", "deepseek_v3"),
        ("glm47", "glm45"),
        ("ling3", "glm45"),
        ("muse_glimmer", "muse"),
        ("musespark1x", "muse"),
    )
}
