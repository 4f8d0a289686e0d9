"""The experts of a token, computed in NumPy and float64 from the definitions."""

import numpy as np


def softmax(x):
    exponentials = np.exp(x - x.max())
    return exponentials / exponentials.sum()


def expected_route(logits, selection_bias, routing):
    """Return one token's {expert: weight}, the best first; among equals, the first."""
    scores = {"softmax": softmax, "softmax_of_chosen": lambda x: x, "sigmoid": lambda x: 1 / (1 + np.exp(-x))}
    scores = scores[routing.scores](logits.astype(np.float64))
    preferences = scores + selection_bias
    size = routing.num_experts // routing.num_groups
    best = {"best": 1, "best_two": 2}[routing.group_score]
    groups = [np.sort(preferences[g * size : (g + 1) * size])[-best:].sum() for g in range(routing.num_groups)]
    allowed = np.argsort(-np.array(groups), stable=True)[: routing.num_chosen_groups]
    preferences = np.where(np.isin(np.arange(len(logits)) // size, allowed), preferences, -np.inf)
    chosen = np.argsort(-preferences, stable=True)[: routing.num_experts_per_token]
    weights = softmax(scores[chosen]) if routing.scores == "softmax_of_chosen" else scores[chosen]
    weights = weights / weights.sum() if routing.is_normalized else weights
    return dict(zip(chosen.tolist(), (weights * routing.scale).tolist(), strict=True))
