"""A few tokens a row of a linear recurrence of matrices, whose states are changed where they are: `recurrent_step`."""

from pallas_kernels.recurrent_step.op import Mixed, Tokens, one_token, recurrent_step, unit
from pallas_kernels.recurrent_step.sm90 import DECAYS_BY_CHANNEL, why_not

__all__ = ["DECAYS_BY_CHANNEL", "Mixed", "Tokens", "one_token", "recurrent_step", "unit", "why_not"]
