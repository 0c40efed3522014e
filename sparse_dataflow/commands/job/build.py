"""From a resolved run to what the loop takes: batches, programs, steps, and the run's record."""

import dataclasses
import datetime
import importlib.metadata
import platform
import socket
from collections.abc import Iterable, Iterator, Sequence

from sparse_dataflow.commands import distillation, run_folder
from sparse_dataflow.commands.job.resolve import Resolved, Start
from sparse_dataflow.commands.job.train_models import ModelInTurn
from sparse_dataflow.commands.preflight import settling
from sparse_dataflow.commands.training_data import thin_data, training_data
from sparse_dataflow.core import collectives
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.training.phases import Variant, refuse_unfit
from sparse_dataflow.core.training.programs import Compiled, TrainingData, compile_programs
from sparse_dataflow.data import cache, held_out
from sparse_dataflow.evaluation.run_files import RunRecord, new_id
from sparse_dataflow.files import console
from sparse_dataflow.pruning.changes import change_of
from sparse_dataflow.runs.mixing import isolated_components


@dataclasses.dataclass(frozen=True)
class Built:
    """A run that only has to be trained.

    Attributes:
      data: training and held-out batches of all models.
      models: in the order of their turns.
      record: of the run, in its folder.
    """

    data: TrainingData
    models: list[ModelInTurn]
    record: RunRecord


def build(run: Resolved, start: Start) -> Built:
    """Reads the data, compiles all programs, fixes the steps, and begins the folder of a new run.

    Raises:
      UserError: the weights, the text or the steps do not fit the models.
    """
    config, record, folder = run.config, run.record, start.folder
    rounded = record.rounded_weights if record else False
    run.beginning.refuse_unfit(run.models, run.tokenizer, record)
    data = training_data(config, run.models[0], run.corpus, run.tokenizer, run.executor, rounded)
    if config.training.teacher:
        teacher = distillation.teacher_of(config, run.tokenizer, record, folder)
        data = dataclasses.replace(data, teacher=teacher)
    if config.training.stored_features != "no":
        data = dataclasses.replace(data, features=cache.FOLDER / "features")
    if config.training.steps:
        _refuse_unfit_steps(run.models)
    if not record:
        _say_all(_isolated_features(run.models))
        if config.training.steps:
            _say_all(thin_data(run.corpus, data.train, run.models))
    programs = _compiled(run, data, start.clock)
    start.check_folder()
    if record:
        own = run_folder.own_record(folder, record)
        return _built(run, data, run.models, programs, own)
    # Without --steps the compiled programs are timed, and the time gives the steps.
    models = _with_steps(run, programs, data, start.clock)
    if not config.training.steps:
        _say_all(thin_data(run.corpus, data.train, models))
    record = _new_record(run, start, models, data)
    # Last: a run that cannot start leaves no folder.
    run_folder.start(folder, config, record, run.tokenizer)
    return _built(run, data, models, programs, record)


def _built(run, data, models, programs, record) -> Built:
    """Returns the models with the weights that each begins with."""
    turns = [
        ModelInTurn(
            v,
            programs[v.name],
            change_of(v.evolution, v.training),
            run.beginning.start(v, run.tokenizer, data, run.executor),
            run.beginning.frozen(v, run.tokenizer, record),
        )
        for v in models
    ]
    return Built(data, turns, record)


def _compiled(run: Resolved, data: TrainingData, clock) -> dict[str, list[Compiled]]:
    programs: dict[str, list[Compiled]] = {}
    shared: dict = {}
    for v in run.models:
        say(f"{v.name:>6}: compiling")
        change = change_of(v.evolution, v.training)
        with clock.during("compile"):
            programs[v.name] = compile_programs(
                v.phase_specs, v.training, data, v.evolution, shared, run.executor, change
            )
    return programs


def _with_steps(run: Resolved, programs, data: TrainingData, clock) -> list[Variant]:
    """Returns the models with the steps that the config says, or that fit into its minutes."""
    with clock.during("compile"):
        steps = settling.planned_steps(run.config, run.models, programs, data, run.executor)
    steps = collectives.broadcast(steps)
    models = [v.with_steps(steps[v.name]) for v in run.models]
    _refuse_unfit_steps(models)
    return models


def _new_record(
    run: Resolved, start: Start, models: Sequence[Variant], data: TrainingData
) -> RunRecord:
    corpus, tokenizer = run.corpus, run.tokenizer
    record = RunRecord(
        experiment=start.experiment,
        command=start.command,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=_versions(),
        machine=f"{run.chip.name} ({platform.machine()})",
        corpus=corpus.name,
        corpus_hash=corpus.content_hash,
        tokenizer=tokenizer.content_hash,
        vocab_size=tokenizer.vocab_size,
        steps={v.name: v.training.steps for v in models},
        init_from=run.beginning.provenance(tokenizer, corpus),
        teacher=dict(data.teacher.source) if data.teacher else None,
        code=run_folder.code_facts(),
        host=socket.gethostname(),
        seed=run.config.training.seed,
        rounded_weights=False,
        id=collectives.broadcast(new_id()),
        split_version=held_out.VERSION,
    )
    return RunRecord(**record.to_json())  # The report shows it, without secrets.


def _say_all(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        say(f"note: {sentence}")


def _isolated_features(models: Sequence[Variant]) -> Iterator[str]:
    """Yields a sentence for each model that is cut into parts which never meet."""
    for v in models:
        if v.training.freezes:  # An adapter mixes all features, and vectors change no weight.
            continue
        fixed = [spec.model for spec in v.phase_specs if not spec.runtime_layouts]
        count = max(map(isolated_components, fixed), default=1)
        if count > 1:
            pattern = v.model.linear(v.model.sparse_projections[0]).pattern
            yield (
                f"{v.name}: {pattern} cuts the features into {count} parts that meet in no layer; "
                "monarch and shuffle mix all features, and so does a larger --density or a smaller "
                "--block"
            )


def _refuse_unfit_steps(models):
    for v in models:
        refuse_unfit(v.model, v.evolution, v.training.steps)


def _versions():
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tokenizers")
    return {
        "python": platform.python_version(),
        "sparse_dataflow": console.version(),
        **{package: importlib.metadata.version(package) for package in packages},
    }
