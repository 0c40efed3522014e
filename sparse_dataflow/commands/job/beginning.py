"""The weights that a run begins with: read, pruned, extended or frozen."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from sparse_dataflow.commands import vocabularies
from sparse_dataflow.core.executors.executor import Executor
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.optim.optimizers import TrainState
from sparse_dataflow.core.training.phases import Variant
from sparse_dataflow.core.training.programs import TrainingData
from sparse_dataflow.core.training.saved_state import FrozenBase
from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.evaluation.run_files import RunRecord
from sparse_dataflow.interchange import pattern_pruning, starting_point
from sparse_dataflow.interchange.starting_point import StartingPoint
from sparse_dataflow.planner import memory
from sparse_dataflow.pruning import run_start
from sparse_dataflow.runs.run_config import RunConfig


@dataclasses.dataclass(frozen=True)
class Beginning:
    """What a run begins with, where `run.init_from` names weights; else every state is drawn.

    Attributes:
      config: of the run; for a resumed one, with the model that it began with.
      folder: of the run.
    """

    config: RunConfig
    folder: Path

    @classmethod
    def of(cls, config: RunConfig, folder: Path, record: RunRecord | None) -> "Beginning":
        """Returns the beginning of a run; `record` is that of a resumed one."""
        variant = ((record and record.init_from) or {}).get("variant")
        return cls(config.change(run__init_variant=variant) if variant else config, folder)

    @property
    def named(self) -> bool:
        """Whether the run begins with weights."""
        return bool(self.config.run.init_from)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the weights."""
        return starting_point.read_for(self.config).tokenizer

    def weights(self, tokenizer: Tokenizer) -> StartingPoint:
        """Returns the weights, with rows for the tokens that the run adds."""
        start = starting_point.read_for(self.config)
        if not self.config.data.extend_vocabulary:
            return start
        return starting_point.with_vocabulary(start, tokenizer)

    def provenance(self, tokenizer: Tokenizer, corpus: Corpus) -> dict | None:
        """Returns the source of the weights for the record of a new run, and what its new tokens
        change; None where the run draws its weights."""
        if not self.named:
            return None
        start = dict(self.weights(tokenizer).provenance)
        if self.config.data.extend_vocabulary:
            start["vocabulary"] = vocabularies.measured(self.tokenizer, tokenizer, corpus)
        return start

    def refuse_unfit(
        self, models: Sequence[Variant], tokenizer: Tokenizer, record: RunRecord | None
    ) -> None:
        """Refuses weights whose shapes the models do not have.

        Raises:
          UserError: naming the setting that differs.
        """
        to_pattern = self.config.run.prune_to == "pattern"
        for v in models:
            if v.training.freezes:
                base = self._base(tokenizer, record)
                starting_point.refuse_other_base(base, v.model)
                added = "a side network" if v.training.side_width else "adapters"
                say(f"{v.name:>6}: {added} on {base.words}")
                if to_pattern:
                    pattern_pruning.refuse_other_layouts(base.model, base.params, v.model)
            elif self.named and not record:
                weights, model = self.weights(tokenizer), v.phase_specs[0].model
                say(_begins_with(v.name, weights, model))
                starting_point.refuse_other_model(weights.model, model)
                if to_pattern:
                    pattern_pruning.refuse(weights.model, weights.params, model)

    def start(
        self, v: Variant, tokenizer: Tokenizer, data: TrainingData, executor: Executor
    ) -> Callable[[], TrainState] | None:
        """Returns the function that makes the state before the first step; None where it is drawn.

        A resumed run calls it only where it has no checkpoint.
        """
        if not self.named:
            return None

        def initial():
            run, calibration = self.config.run, []
            weights = self.weights(tokenizer)
            if v.training.freezes:
                return starting_point.adapter_state_from(weights, v.model, v.training, executor)
            if run.prune_by == "rebuild" and v.model.partial_projections:
                batches = map(data.train.__getitem__, itertools.count())
                micro_batches = v.training.micro_batches
                calibration = run_start.calibration(batches, run.prune_batches, micro_batches)
            model = v.phases[0].model
            return starting_point.initial_state_from(
                weights, model, v.training, executor, calibration, run.prune_by, run.prune_to
            )

        return initial

    def frozen(self, v: Variant, tokenizer: Tokenizer, record: RunRecord) -> FrozenBase | None:
        """Returns the weights that the adapters of a model freeze; None for one without adapters.

        Args:
          record: of the run, which has begun.
        """
        if not v.training.freezes:
            return None
        source = {name: (record.init_from or {}).get(name) for name in ("path", "weights")}

        def read():
            return starting_point.frozen_base(self._base(tokenizer, record), v.model, v.training)

        return FrozenBase(source, read)

    def _base(self, tokenizer, record) -> StartingPoint:
        """Returns the weights that adapters freeze; those of its start for a run with a record."""
        if record:
            return starting_point.read_base(record, self.folder)
        return self.weights(tokenizer)


def _begins_with(name, start, model) -> str:
    """Returns what a model begins with, and the share of its projections' weights that it keeps."""
    before, after = memory.matrix_count(start.model), memory.matrix_count(model)
    pruned = f", pruned to {after / before:.1%} of its projections' weights"
    return f"{name:>6}: begins with {start.words}{pruned * (after < before)}"
