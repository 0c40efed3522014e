"""The models of a run, resolved from a `RunConfig`."""

import dataclasses
from collections.abc import Mapping

from sparse_dataflow.core.config.layer_groups import layer_groups
from sparse_dataflow.core.config.projections import PRECISIONS
from sparse_dataflow.core.config.sparsity import GROUPED_PATTERNS, EvolutionConfig
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.layouts.evolution import METHODS, phase_specs
from sparse_dataflow.core.training.phases import Variant, mean_flops_per_token
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.adapted_model import with_adapters
from sparse_dataflow.runs.allocation import allocate
from sparse_dataflow.runs.equal_cost import equal_cost_model
from sparse_dataflow.runs.run_config import RunConfig


def variants(
    config: RunConfig, vocab_size: int | None = None, steps: Mapping[str, int] | None = None
) -> list[Variant]:
    """Returns the models that a run trains.

    Args:
      vocab_size: number of tokens of the tokenizer; `config.model.vocab_size` if None.
      steps: variant -> number of steps; if None those of the config, at least 1.

    Raises:
      UserError: the model, its layouts or the micro-batches are impossible; names legal values.
    """
    warmups = config.training.warmup_steps
    if warmups and len(warmups) != len(config.variants):
        raise UserError(
            f"training.warmup_steps={','.join(map(str, warmups))} has {len(warmups)} numbers; "
            f"legal: one for each model ({', '.join(config.variants)}), or none."
        )

    def planned(number, name):
        # The setting has a number for each model; a model's own training has its own number.
        training = dataclasses.replace(config.training, warmup_steps=warmups[number : number + 1])
        with_warmup = dataclasses.replace(config, training=training)
        # One step suffices where the length is given in minutes: shapes and layouts do not depend
        # on it.
        count = steps[name] if steps else config.training.steps or 1
        return variant(with_warmup, name, vocab_size).with_steps(count)

    return [planned(number, name) for number, name in enumerate(config.variants)]


def variant(config: RunConfig, name: str, vocab_size: int | None = None) -> Variant:
    """Returns a model of a run; see `variants`.

    "narrow" is the model without sparse weights whose width gives it the training FLOPs per token
    of the sparse model, on average over its phases.  Settings that the planner has not settled are
    those of `RunConfig.without_auto`.
    """
    config = config.without_auto()
    dense = dataclasses.replace(
        config.model,
        vocab_size=vocab_size or config.model.vocab_size + config.data.extend_vocabulary,
        seed=config.training.seed,
        bidirectional=config.training.hides_tokens,
    )
    training = config.training
    adapted = (
        training.adapter_rank,
        training.frozen_dtype,
        training.prompt_vectors,
        training.side_width,
    )
    if name != "sparse" and config.sparsity.projections:
        # A twin is the plain training to compare with: no teacher, and dense from the start.
        plain = dataclasses.replace(config.training, teacher="", teacher_first=0.0)
        config = dataclasses.replace(config, training=plain)
    if name == "dense":
        model = with_adapters(dense, *adapted)
        method = METHODS[config.evolution.method]
        # Some methods change a dense model; beside a sparse model it is a twin, which stays as it
        # is.
        changes_dense = method.phase_specs is not None and not method.changes_blocks
        alone = changes_dense and not config.sparsity.projections
        evolution = config.evolution if alone else EvolutionConfig()
        phase_specs(model, evolution)  # Raises if the method does not fit the model.
        return Variant(name, model, config.training, evolution)
    if name == "narrow":
        sparse = variant(config, "sparse", vocab_size)
        return at_flops_of(Variant(name, dense, config.training), sparse)
    model = dataclasses.replace(dense, linears=config.sparsity.linears(config.model))
    model = with_adapters(allocate(model, config.sparsity.budget), *adapted)
    model_layouts.check_layouts(model)
    # Blocks that are chosen from given weights are known at run time only, those of a pattern
    # before.
    given = bool(config.run.init_from) and config.run.prune_to == "blocks"
    evolution = dataclasses.replace(config.evolution, given_layouts=given)
    sparse = Variant(name, model, config.training, evolution)
    # Raises if the method does not fit the model.
    for spec in phase_specs(sparse.model, sparse.evolution):
        _refuse_unequal_groups(spec)
        _refuse_unequal_layers(spec.model)
    return sparse


def at_flops_of(chosen: Variant, rival: Variant) -> Variant:
    """Returns a variant at the width at which its tokens cost the FLOPs of the rival's.

    FLOPs are means over the phases of a training.

    Raises:
      UserError: no width has them.
    """
    sequence = chosen.training.sequence

    def flops(model):
        return mean_flops_per_token(model, chosen.evolution, sequence)

    target = mean_flops_per_token(rival.model, rival.evolution, sequence)
    return dataclasses.replace(chosen, model=equal_cost_model(chosen.model, flops, target))


def _refuse_unequal_layers(model):
    """Raises UserError if layers are to share a block and have different layouts."""
    if not model.shared_layers:
        return
    for name, (first, *others) in model_layouts.layouts(model).items():
        if any(layout != first for layout in others):
            raise UserError(
                "--evolution=shared_to_own trains one block for all layers, and the pattern "
                f"{model.linear(name).pattern} gives each its own layout of {name}; legal: a "
                f"pattern that does not, such as {' or '.join(GROUPED_PATTERNS)}."
            )


def _refuse_unequal_groups(spec):
    """Raises UserError if a product is to be quantised whose layout has no equal groups."""
    if not spec.model.quantized or not spec.model.sparse_projections:
        return
    head = f"model.precision={spec.model.precision} needs layouts of equal groups"
    patterns = " or ".join(GROUPED_PATTERNS)
    legal = f"legal: sparsity.pattern={patterns}, or model.precision={PRECISIONS[0]}."
    if spec.runtime_layouts:
        raise UserError(
            f"{head} that are known before training, which run.init_from and methods of "
            "evolution that choose blocks do not have; legal: drawn weights with a method that "
            f"chooses none, such as --evolution=static, or model.precision={PRECISIONS[0]}."
        )
    for group in layer_groups(spec.model):
        first = dataclasses.replace(group.model, num_layers=1)
        for projection, (layout,) in model_layouts.layouts(first).items():
            if layout.groups is None:
                pattern = spec.model.linear(projection).pattern
                raise UserError(f"{head}, and {pattern} has none in {projection}; {legal}")
