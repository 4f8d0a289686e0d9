"""Tensors that checkpoints contain and no model reads: they are left out, where any other is an error."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.loading.bounds import NEXT_TOKEN_LAYERS
from jaxserve.loading.classifier import HEAD, is_classifier

logger = logging.getLogger(__name__)

KNOWN_EXTRAS = (
    *("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq", ".attn.bias", ".attn.masked_bias"),
    *(".attention.bias", ".attention.masked_bias", "lm_head.weight", "embed_out.weight", "t2d"),
)
"""Ends of names: rotary tables of old Llamas, causal masks of old GPTs, an LM head that equals the embedding (a family
declares any other), and which tokens an EAGLE-3 head has.
"""
STATIC_SCALES = (
    *(".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".prob_scale"),
    *(".k_proj.output_scale", ".v_proj.output_scale"),
)
"""Ends of names of the scales of a whole layer's attention: compressed-tensors gives those of keys and values to what
projections put out. Those of keys and values are declared, and read, with
`--kv-cache-dtype fp8` only; those of queries and probabilities never.
"""
STREAM_SCALE = ".altup.correct_output_scale"
"""End of the names of a Gemma 3n's weights that are of no use with `altup_correct_scale` false."""
SHARING = {"gemma3n_text": {"num_hidden_layers": 35, "num_kv_shared_layers": 15}}
"""Defaults of families in which layers read the keys and values of others unless config.json says that none do."""
FURTHER_PREFIXES = ("mtp.", "model.mtp.", "model.mtp_")
"""Beginnings of names of tensors with which checkpoints predict further tokens, outside their list of layers."""

_OF_A_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.(self_attn\.[kv]_(proj|norm)\.)?")


class UnreadTensors:
    """The tensors that a checkpoint with these fields of config.json may have beside those that its model reads."""

    def __init__(self, fields: Mapping[str, Any]):
        given = {name: value for name, value in fields.items() if value is not None}
        fields = SHARING.get(str(fields.get("model_type")), {}) | given
        self._names = (HEAD, f"model.{HEAD}") if is_classifier(fields) else ()
        self._ends = (
            KNOWN_EXTRAS + STATIC_SCALES + ((STREAM_SCALE,) if fields.get("altup_correct_scale") is False else ())
        )
        num_layers = fields.get("num_hidden_layers")
        last = num_layers if isinstance(num_layers, int) else 0
        counts = [fields.get(name) for name in NEXT_TOKEN_LAYERS]
        num_further = max((count for count in counts if isinstance(count, int)), default=0)
        sharing = fields.get("num_kv_shared_layers")
        # Layers after the last one predict further tokens; the last ones may read the keys and values of others.
        self._further_layers = range(last, last + num_further) if last else range(0)
        self._sharing_layers = range(last - sharing, last) if last and isinstance(sharing, int) else range(0)

    def has(self, name: str) -> bool:
        """Return true if there may be a tensor of this name."""
        layer = _OF_A_LAYER.match(name)
        makes_unused_keys = layer is not None and bool(layer[2]) and int(layer[1]) in self._sharing_layers
        is_known = name in self._names or name.endswith(self._ends)
        return is_known or makes_unused_keys or self._is_further(name)

    def log(self, names: Sequence[str]) -> None:
        """Say what of these is left out that would do something elsewhere."""
        if further := [name for name in names if self._is_further(name)]:
            logger.info(
                "left out: %d tensors of layers that predict further tokens, such as %s", len(further), further[0]
            )
        if scales := [name for name in names if name.endswith(STATIC_SCALES)]:
            logger.info(
                "left out: %d static scales of attention, such as %s: those of keys and values are used with "
                "--kv-cache-dtype fp8 only, those of queries and probabilities never",
                *(len(scales), scales[0]),
            )

    def _is_further(self, name: str) -> bool:
        """Return true for tensors of layers that predict further tokens."""
        layer = _OF_A_LAYER.match(name)
        return name.startswith(FURTHER_PREFIXES) or (layer is not None and int(layer[1]) in self._further_layers)
