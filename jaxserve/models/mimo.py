"""MiMo 7B (Xiaomi 2025, arXiv:2505.07608): Qwen 2 with layers that predict further tokens, which are left out."""

from dataclasses import replace

from jaxserve.models import qwen2

FAMILY = replace(qwen2.FAMILY, doc=__doc__)
