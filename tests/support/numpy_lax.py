"""The functions of `jax.lax` that bodies of kernels use, in NumPy."""

import numpy as np


def fori_loop(start, end, body, state):
    """Run a loop; indices are int32."""
    for i in range(int(start), int(end)):
        state = body(np.int32(i), state)
    return state


def while_loop(condition, body, state):
    """Run the body while the condition holds."""
    while condition(state):
        state = body(state)
    return state


def broadcast_in_dim(x, shape, axes):
    """Broadcast a vector along one axis."""
    [axis] = axes
    return np.broadcast_to(np.expand_dims(x, tuple(i for i in range(len(shape)) if i != axis)), shape)
