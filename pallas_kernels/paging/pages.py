"""Pages: the keys and values of a layer's tokens, with the scales of both if they are held in 8 bits."""

from typing import NamedTuple

from jaxtyping import Array, Float


class Pages(NamedTuple):
    """P pages of S tokens each. A (page, head) tile is contiguous, so that a kernel fetches it with one copy."""

    k: Float[Array, "P K S D"]
    v: Float[Array, "P K S D"]
