"""A few tokens a row of a linear recurrence of matrices, whose states are changed where they are: `recurrent_step`."""

from pallas_kernels.recurrent_step.op import Implementation, Tokens, one_token, recurrent_step
from pallas_kernels.recurrent_step.sm90 import why_not

__all__ = ["Implementation", "Tokens", "one_token", "recurrent_step", "why_not"]
