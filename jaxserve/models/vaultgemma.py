"""VaultGemma (Google 2025, arXiv:2510.15001): Gemma 2 without norms after blocks."""

import functools
from dataclasses import replace

from jaxserve.layers.layer import PRE_NORMS
from jaxserve.models import gemma2

READ = functools.partial(gemma2.read, norms=PRE_NORMS)
FAMILY = replace(gemma2.FAMILY, read=READ, doc=__doc__, features=("attention cap",))
