"""Shapes that fit a budget, with the loss that a law predicts for each."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.planner.decoding import decoding_bytes
from sparse_dataflow.runs.equal_cost import stored_parameters

from . import arms, study, training
from .arms import Arm, Course
from .shape_law import Pruning, Studies

STEP = 4
"""Widths are multiples of this, and of heads and blocks."""

USED = 0.8
"""Least fraction that a candidate uses of the served budget, and of the training budget."""

BEYOND = 2.0
"""Largest ratio of mean weights or tokens to those of the nearest dense run."""

RATIOS = (1, 1.5, 2, 3, 4, 6, 8, 12)
"""Values of d_ff / d_model of pruned candidates, within those of the dense runs."""

HEADS = (1, 2 / 3, 1 / 2)
"""Width of all heads of pruned candidates, relative to d_model."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """Limits of a candidate; infinite for none.

    Attributes:
      served_flops: forward FLOPs of a token.
      served_bytes: bytes that a token reads at batch 1, with the KV cache of a whole sequence.
      training_flops: of the whole training.
      tokens: of the training text.
    """

    served_flops: float
    served_bytes: float
    training_flops: float
    tokens: float

    def served_by(self, share: float) -> "Budget":
        """Returns the budget with a share of its served costs."""
        flops, read = share * self.served_flops, share * self.served_bytes
        return dataclasses.replace(self, served_flops=flops, served_bytes=read)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A shape, how it is trained, and what is predicted.

    Attributes:
      model: the dense shape, which is trained first.
      served: the model that is served.
      arm: how `model` is pruned; `Arm()` for a dense model.
      narrow_steps: steps of `model` without pruning, with the same training FLOPs.
      course: steps, cuts and mean weights of the training.
      tokens: of the training.
      served_flops: forward FLOPs of a token.
      served_bytes: bytes that a token reads at batch 1.
      loss: predicted, bits a symbol.
      error: of the prediction, as a fraction of it.
      extrapolated: whether mean weights or tokens are outside of the dense runs.
    """

    model: ModelConfig
    served: ModelConfig
    arm: Arm
    narrow_steps: float
    course: Course
    tokens: float
    served_flops: float
    served_bytes: float
    loss: float
    error: float
    extrapolated: bool

    @property
    def name(self) -> str:
        """Layers, d_model and d_ff; of a pruned one also heads' width, density, and percent of the
        training FLOPs at which it is cut."""
        model = self.model
        text = f"{model.num_layers}x{model.d_model}x{model.d_ff}"
        if not self.arm.pruned:
            return text
        heads = model.num_heads * model.head_width
        cut = f"{100 * self.arm.start:g}_{100 * self.arm.end:g}"
        return f"{text}_heads_{heads}_density_{self.arm.density:.3f}_cut_{cut}"


def search(studies: Studies, budget: Budget) -> list[Candidate]:
    """Returns the best candidate of each depth and width, from the lowest predicted loss.

    Depths and values of d_ff / d_model are within those of the dense runs.

    Raises:
      UserError: no candidate; names the budgets of the runs.
    """
    best: dict[tuple[int, int], Candidate] = {}
    for candidate in _candidates(studies, budget):
        key = candidate.model.num_layers, candidate.model.d_model
        if key not in best or candidate.loss < best[key].loss:
            best[key] = candidate
    if not best:
        raise UserError(_no_candidate(studies))
    return sorted(best.values(), key=lambda candidate: candidate.loss)


def served_bytes(model: ModelConfig) -> float:
    """Returns the bytes that a token reads at batch 1, with the KV cache of a whole sequence."""
    return decoding_bytes(model, 1, model.max_len)


def _no_candidate(studies):
    served, trained = studies.span("served_flops"), studies.span("training_flops")
    tokens = studies.span("tokens")
    read = [served_bytes(result.model) for result in studies.dense]
    return (
        "No shape that the law can price uses this budget. Legal: budgets near the dense runs, "
        f"which have {served[0]:.3g} to {served[1]:.3g} served FLOPs a token ({min(read):.3g} to "
        f"{max(read):.3g} bytes), {trained[0]:.3g} to {trained[1]:.3g} training FLOPs and "
        f"{tokens[0]:.3g} to {tokens[1]:.3g} tokens, or --studies of the size you want."
    )


def _candidates(studies: Studies, budget: Budget) -> Iterator[Candidate]:
    models = [result.model for result in studies.dense]
    depths = [model.num_layers for model in models]
    ratios = [model.d_ff / model.d_model for model in models]
    heaviest = BEYOND * studies.span("weights")[1]
    for layers in range(min(depths), max(depths) + 1):
        for pruning in (None, *studies.prunings):
            multiple = math.lcm(
                STEP, studies.options.heads, *(pruning.arm.block_sides if pruning else ())
            )
            for width in range(multiple, round(heaviest), multiple):
                least = studies_model(studies, layers, width, width * min(ratios))
                density = pruning.densities[0] / 2 if pruning else 1.0
                if density * stored_parameters(least) > heaviest:
                    break
                shapes = (
                    _pruned(studies, layers, width, multiple, ratios, budget, pruning)
                    if pruning
                    else _dense(studies, layers, width, ratios, budget)
                )
                for model, arm in shapes:
                    candidate = _priced(studies, budget, model, arm, pruning)
                    if candidate:
                        yield candidate


def studies_model(studies: Studies, layers: int, width: int, hidden: float) -> ModelConfig:
    """Returns a dense model of the studies' text, d_ff being the next lower multiple of STEP."""
    hidden = max(STEP, int(hidden) // STEP * STEP)
    model = study.model_of(studies.options, width, studies.options.heads, hidden)
    return dataclasses.replace(model, num_layers=layers)


def _dense(studies, layers, width, ratios, budget):
    """Yields the model with the widest MLP that the budget serves."""
    low, high = (studies_model(studies, layers, width, STEP * n) for n in (1, 2))
    hidden = max(ratios) * width
    for limit, price, _ in _limits(budget):
        slope = (price(high) - price(low)) / STEP
        hidden = min(hidden, STEP + (limit - price(low)) / slope)
    if hidden >= min(ratios) * width:
        yield studies_model(studies, layers, width, hidden), Arm()


def _pruned(studies, layers, width, multiple, ratios, budget, pruning):
    """Yields wide models with the density that the budget serves."""
    for ratio in RATIOS:
        dense = studies_model(studies, layers, width, width * ratio)
        if not min(ratios) <= ratio <= max(ratios) or dense.d_ff % multiple:
            continue
        for share in HEADS:
            heads = round(share * width / multiple) * multiple
            if not heads:
                continue
            model = dense
            if heads != width:
                model = dataclasses.replace(dense, head_dim=heads // dense.num_heads)
            shapes = (model.projection_shape(name) for name in pruning.arm.pruned)
            weights = layers * sum(math.prod(shape) for shape in shapes)
            density = 1 + min(
                (limit - price(model)) / (weight_price * weights)
                for limit, price, weight_price in _limits(budget)
            )
            low, high = pruning.densities
            if low / 2 <= density <= min(0.99, 2 * high):
                yield model, dataclasses.replace(pruning.arm, density=density)


def _limits(budget):
    """Yields (limit, price of a model, price of one of its weights) of what is served."""
    if budget.served_flops < math.inf:
        yield budget.served_flops, _served_flops, 2.0
    if budget.served_bytes < math.inf:
        yield budget.served_bytes, served_bytes, 4.0


def _served_flops(model):
    return sum(arms.served_sections(model).values())


def _priced(studies, budget, model, arm, pruning: Pruning | None) -> Candidate | None:
    """Returns the candidate; None if it leaves a budget unused or is far from the dense runs."""
    served = arms.at_density(model, arm, arm.density or 1.0)
    if max(price(served) / limit for limit, price, _ in _limits(budget)) < USED:
        return None
    step_tokens = studies.options.batch * model.max_len
    most = BEYOND * studies.span("tokens")[1] / step_tokens
    steps = min(
        budget.training_flops / arms.training_flops(model) / step_tokens,
        budget.tokens / step_tokens,
    )
    if not training.CHUNK <= steps <= most:
        return None
    course = arms.course(model, arm, steps, training.CHUNK, studies.options.batch)
    if course.steps * step_tokens > budget.tokens:
        steps *= budget.tokens / (course.steps * step_tokens)
        course = arms.course(model, arm, steps, training.CHUNK, studies.options.batch)
    tokens = course.steps * step_tokens
    use = max(course.flops / budget.training_flops, tokens / budget.tokens)
    weights, read = studies.span("weights"), studies.span("tokens")
    near = all(
        low / BEYOND <= value <= high * BEYOND
        for value, (low, high) in ((course.mean_weights, weights), (tokens, read))
    )
    if use < USED or not near:
        return None
    inside = weights[0] <= course.mean_weights <= weights[1] and read[0] <= tokens <= read[1]
    loss = float(studies.law.loss([course.mean_weights], [tokens], [model])[0])
    error = studies.error
    if pruning:
        excess = pruning.excess(model, arm.density, tokens / course.mean_weights)
        if excess == math.inf:
            return None
        loss *= math.exp(excess)
        error = float(np.hypot(error, pruning.error))
    return Candidate(
        model, served, arm, steps, course, tokens, _served_flops(served), served_bytes(served),
        loss, error, not inside,
    )  # fmt: skip
