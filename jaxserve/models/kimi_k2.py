"""Kimi K2 and K2 Thinking (Kimi Team 2025, arXiv:2507.20534): DeepSeek V3 with more experts and fewer heads."""

from dataclasses import replace

from jaxserve.models import deepseek_v3

FAMILY = replace(deepseek_v3.FAMILY, doc=__doc__)
