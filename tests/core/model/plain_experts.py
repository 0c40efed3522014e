"""A mixture of experts as a loop over tokens and experts, in numpy."""

import math

import numpy as np
from activation_formulas import FORMULAS

from sparse_dataflow.core.layouts import model_layouts


def product(config, module, name, x, expert=None):
    """Applies a projection of one expert, or of the shared one, to one token."""
    leaves = {k: v if expert is None else v[expert] for k, v in module[name].items()}
    if "values" in leaves:
        weight = model_layouts.expert_layout(config, name).to_dense(leaves["values"])
    else:
        weight = leaves["kernel"]
    return x @ weight + leaves.get("bias", 0.0)


def mlp(config, module, x, expert=None):
    """Applies an MLP to one token."""
    hidden = product(config, module, "mlp_in", x, expert)
    activation = FORMULAS[config.activation]
    if config.gated_mlp:
        hidden = hidden * activation(product(config, module, "mlp_gate", x, expert))
    else:
        hidden = activation(hidden)
    return product(config, module, "mlp_out", hidden, expert)


def choose(config, router, x_NxD):
    """Returns [(expert, whether it has room) of each choice] of each token."""
    size = config.experts // config.prototypes
    room = math.inf
    if config.expert_capacity:
        choices = len(x_NxD) * config.prototypes * config.top_k
        room = math.ceil(config.expert_capacity * choices / config.experts)
    loads, result = [0] * config.experts, []
    for x in x_NxD:
        logits, token_choices = x @ router, []
        for start in range(0, config.experts, size):
            best = sorted(range(start, start + size), key=lambda e: -logits[e])
            for expert in best[: config.top_k]:
                loads[expert] += 1
                token_choices.append((expert, loads[expert] <= room))
        result.append(token_choices)
    return result


def apply(config, params, x_NxD, choices):
    """Returns (y [N, D], balance loss, z-loss) in float64, for given choices."""
    size, tokens, y = config.experts // config.prototypes, len(x_NxD), np.zeros_like(x_NxD)
    counts = np.zeros(config.experts)
    for expert, _ in (choice for token in choices for choice in token):
        counts[expert] += 1
    balance = z = 0.0
    for n, (x, token_choices) in enumerate(zip(x_NxD, choices)):
        exponentials = np.exp(x @ params["router"])
        for start in range(0, config.experts, size):
            total = exponentials[start : start + size].sum()
            z += math.log(total) ** 2 / tokens
            mine = [(e, has_room) for e, has_room in token_choices if start <= e < start + size]
            if config.top_k > 1 and not config.raw_gates:
                divisor = sum(exponentials[e] for e, _ in mine)
            else:
                divisor = total
            for expert, has_room in mine:
                if has_room:
                    y[n] += exponentials[expert] / divisor * mlp(config, params, x, expert)
            for expert in range(start, start + size):
                share = counts[expert] / counts.sum()
                balance += size * share * exponentials[expert] / total / tokens
        if config.shared_expert:
            shared = params["shared"]
            gate = 1 / (1 + np.exp(-x @ shared["router"])) if config.shared_gate else 1
            y[n] += gate * mlp(config, shared, x)
    return y, balance, z
