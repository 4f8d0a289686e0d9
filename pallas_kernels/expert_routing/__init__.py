"""From a router's logits to the experts of each token, sorted for their matmuls: `expert_routing`."""

from pallas_kernels.expert_routing.op import expert_routing
from pallas_kernels.expert_routing.routing import Routed, Routing
from pallas_kernels.expert_routing.sm90 import why_not

__all__ = ["Routed", "Routing", "expert_routing", "why_not"]
