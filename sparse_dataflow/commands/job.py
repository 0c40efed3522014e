"""One start of a run: data, programs, training, report."""

import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import itertools
import platform
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from sparse_dataflow.cluster import processes
from sparse_dataflow.cluster.signals import stop_on_signals
from sparse_dataflow.commands import (
    address_runs,
    devices,
    distillation,
    request,
    run_folder,
    run_report,
    vocabularies,
)
from sparse_dataflow.commands.preflight import relay_plan, settling
from sparse_dataflow.commands.training_data import corpus_of, thin_data, tokenizer_of, training_data
from sparse_dataflow.core import collectives
from sparse_dataflow.core.checkpoint.checkpoint import Checkpoints
from sparse_dataflow.core.messages import say, say_result
from sparse_dataflow.core.ops import quantized
from sparse_dataflow.core.optim.optimizers import TrainState
from sparse_dataflow.core.training import cost, hooks
from sparse_dataflow.core.training.clock import Clock
from sparse_dataflow.core.training.loop import StepDone, Trainer, advance_side_by_side
from sparse_dataflow.core.training.phases import FULL_DEPTH, Variant, refuse_unfit
from sparse_dataflow.core.training.programs import Compiled, TrainingData, compile_programs
from sparse_dataflow.core.training.saved_state import FrozenBase
from sparse_dataflow.data import cache, hub
from sparse_dataflow.data.corpora import Corpus, corpus_of_texts
from sparse_dataflow.data.examples import as_text
from sparse_dataflow.data.token_ids import with_text
from sparse_dataflow.data.tokenizer import KINDS, Tokenizer
from sparse_dataflow.evaluation import run_files, trained
from sparse_dataflow.evaluation.run_files import RunRecord
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files import console, loopback
from sparse_dataflow.files.addresses import Address, is_address
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import detect as hardware
from sparse_dataflow.interchange import growth, pattern_pruning, starting_point
from sparse_dataflow.interchange.starting_point import StartingPoint
from sparse_dataflow.monitoring import goodput, trackers
from sparse_dataflow.monitoring.goodput import stall_alerts
from sparse_dataflow.monitoring.metrics import MetricsWriter, read_metrics
from sparse_dataflow.monitoring.time_budget import TimeBudget
from sparse_dataflow.monitoring.time_left import Progress, Show, TimeLeft
from sparse_dataflow.monitoring.user_metrics import UserMetrics
from sparse_dataflow.planner import memory
from sparse_dataflow.pruning import run_start
from sparse_dataflow.pruning.changes import change_of
from sparse_dataflow.relay.relay_executor import RelayExecutor
from sparse_dataflow.reporting.report import PAGE
from sparse_dataflow.runs.allocation import allocation_table
from sparse_dataflow.runs.mirror import copied_to
from sparse_dataflow.runs.mixing import isolated_components
from sparse_dataflow.runs.run_config import RunConfig
from sparse_dataflow.runs.variants import variants

EVALUATIONS_A_RUN = 8

COMPILE_SHARE = 1.4
"""Seconds in which the report compiles sections and generation, over those of the training step."""

SECTION_STEPS = 6
"""Executions of each section, which make about one step together."""


def _progress_of(
    clock: Clock, models: Sequence[Variant], programs: Mapping[str, Sequence[Compiled]]
) -> Progress:
    """Returns the progress of a run whose models train in turns."""
    compiled = {v.name: programs[v.name][-1].seconds for v in models}

    def report(name: str, step: float) -> float:
        return COMPILE_SHARE * compiled[name] + SECTION_STEPS * step

    return Progress(TimeLeft(clock.seconds_by_activity, report))


@dataclasses.dataclass(frozen=True)
class Run:
    """A run and its folder.

    Attributes:
      finished: whether every model came to its last step.
      headline: a sentence with the held-out bits per byte; "" where the run was stopped.
      status: the exit status of an experiment that made it.
    """

    folder: Path
    config: RunConfig
    finished: bool
    headline: str = ""
    status: int = 0

    def model(self, variant: str = "", checkpoint: str = trained.NEWEST) -> Model:
        """The trained model of a variant; of the first one where none is named."""
        variant = variant or self.config.variants[0]
        return starting_point.load_run(self.folder, variant, checkpoint)

    def metrics(self, variant: str = "") -> list[dict]:
        """The rows of a variant's metrics.jsonl, in order; each has "kind" and "step"."""
        return read_metrics(self.folder / (variant or self.config.variants[0]) / "metrics.jsonl")


class Job:
    """One start of a run: a new one, or one that goes on.

    Args:
      config: of the run; its paths exist.
      experiment: name of the experiment, which the run folder keeps.
      command: words of the command line, or the Python call, that began it.
      folder: the run folder, which this process has locked.
      clock: counts the seconds since the start.
      check_folder: raises UserError if the folder was deleted or moved.
      resume: whether the folder has a run, which goes on.
      metrics: see `train.train`.
    """

    def __init__(
        self,
        config: RunConfig,
        experiment: str,
        command: tuple[str, ...],
        folder: Path,
        clock: Clock,
        check_folder: Callable[[], None],
        resume: bool,
        metrics: Mapping[str, Callable[[StepDone], float]],
    ):
        self.user_metrics = metrics
        UserMetrics(metrics)  # Refuses illegal ones before any work.
        self.config, self.experiment, self.command = config, experiment, command
        self.folder, self.clock = folder, clock
        self._check_folder, self._resume = check_folder, resume
        self.chip = hardware.detect([config.model.compute_dtype])
        # Before anything that is compiled or written: the plan is part of the config.
        free = resume and run_folder.MICRO_BATCHES not in run_folder.fixed_paths(config)
        self.config = settling.settled(config, self.chip, free)
        self.executor = devices.executor(self.config)
        self.mirror: Path | Address | None = None
        self._began: Mapping[str, Any] | None = None

    def run(self, texts: Sequence[str] | None) -> Run:
        """Trains every model of the config and writes the report; see `train.train`."""
        resume = self._resume
        self.config = settling.settled_remat(self.config, self.chip, self.executor)
        config, folder = self.config, self.folder
        record = self._saved_record() if resume else None
        self._began = record.init_from if record else None
        self._refuse_unfit_machine()
        corpus = self._corpus(texts, record)
        tokenizer = self.tokenizer = self._tokenizer(corpus, resume)
        config = self.config
        if record:
            run_folder.refuse_other_data(folder, record, corpus, tokenizer)
        models = variants(config, tokenizer.vocab_size, record.steps if record else None)
        for v in models:
            _say_allocation(v)
        rounded = record.rounded_weights if record else False
        data = training_data(config, models[0], corpus, tokenizer, self.executor, rounded)
        if config.training.teacher:
            teacher = distillation.teacher_of(config, tokenizer, record, folder)
            data = dataclasses.replace(data, teacher=teacher)
        if config.training.steps:
            _refuse_unfit_steps(models)
        self._refuse_unfit_weights(models, record)
        if not record:
            _say_all(_isolated_features(models))
        if not record and config.training.steps:
            _say_all(thin_data(corpus, data.train, models))
        programs = self._compiled(models, data)
        self._check_folder()
        if not record:
            models = self._planned(models, programs, data)
            if not config.training.steps:
                _say_all(thin_data(corpus, data.train, models))
            record = self._new_record(models, corpus, tokenizer, data)
            run_folder.start(folder, config, record, tokenizer)
        self.mirror = run_folder.mirrored(folder, config.run.mirror)

        goodput_log = goodput.GoodputLog(folder, self.clock)
        with contextlib.ExitStack() as stack:
            trainers = []
            progress = _progress_of(self.clock, models, programs)
            stack.callback(progress.close)
            for v in models:
                trainer = self._trainer(v, data, programs[v.name], progress, record)
                stack.push(functools.partial(_close, trainer))
                trainers.append(trainer)
                if config.run.init_from and not trainer.step:
                    row = trainer.evaluate()
                    say(f"{v.name:>6}: held-out loss before the first step {row['loss']:.4f}")
                if resume:
                    say(f"{v.name:>6}: resumes after step {trainer.step} of {v.training.steps}")
            progress.time_left.begin()
            with stop_on_signals(say, config.run.grace) as stop:
                self._advance(trainers, stop, goodput_log)
            # Also where a signal came after the last step.
            stopped = collectives.any_process(bool(stop()))
            finished = all(trainer.finished for trainer in trainers) and not stopped
            if words := data.train.skipped_words:
                say(f"left out of {corpus.name}: {words}")
            if finished:
                for trainer in trainers:
                    progress.stage(f"evaluating {trainer.name} on held-out text")
                    trainer.evaluate_finally()
                    progress.time_left.evaluated(trainer.name)
                progress.stage("writing the report")
        goodput_log.write(ended=not finished)
        if not finished:
            if uncopied := address_runs.finished(folder, self.mirror, config.variants):
                say(uncopied)
            place = config.run.out if is_address(config.run.out) else str(folder)
            again = f"{self.command[0]} {shlex.join(request.resume_flags(config, place))}"
            if self.command[0].startswith(run_files.PYTHON_CALL):
                given = {"texts": texts is not None, "metrics": self.user_metrics}
                passed = "".join(f", {name}={name}" for name in given if given[name])
                again = f"sd.train(config.change(run__out={place!r}){passed}, resume=True)"
            say(f"stopped; resume with: {again}")
            return Run(folder, config, False, status=processes.stopped_status(stop()))
        headline = ""
        if collectives.is_first():
            for v in models:
                if spans := programs[v.name][-1].timeline():
                    say(f"{v.name:>6}: {relay_plan.measured(spans)}")
            with self.clock.during("report"):
                headline = self._report(record, trainers, corpus, tokenizer, goodput_log)
        if uncopied := address_runs.finished(folder, self.mirror, config.variants):
            if is_address(config.run.out):
                raise UserError(uncopied)
            say(uncopied)
        return Run(folder, config, True, headline)

    def _report(self, record, trainers, corpus, tokenizer, goodput_log) -> str:
        """Writes the report, and says the results; returns the losses in a sentence."""
        self._check_folder()
        seconds = goodput_log.seconds(sum(t.seconds for t in trainers))
        answers = self.config.data.loss == "answers"
        corpus = (as_text if answers else with_text)(corpus, tokenizer)
        losses = run_report.write(
            self.folder, record, trainers, corpus, tokenizer, self.chip, seconds
        )
        goodput_log.write(ended=True)
        say_result(losses)
        say(goodput.summary(seconds))
        say_result(f"report: {self.folder / PAGE}")
        return losses

    def _saved_record(self) -> RunRecord:
        saved = run_files.read_config(self.folder)
        run_folder.refuse_other_config(self.folder, saved, self.config)
        return run_files.read_record(self.folder, saved)

    def _refuse_unfit_machine(self):
        """Refuses what these devices cannot train, before any work."""
        planned = variants(self.config)
        if self.config.model.quantized:
            quantized.library()
            model = self.config.model
            say(self.chip.product_words(model.precision, model.compute_dtype))
        devices.check(self.executor, self.config, planned)
        if isinstance(self.executor, RelayExecutor):
            self.executor = relay_plan.settled(planned, self.chip, self.executor)

    def _refuse_unfit_weights(self, models: list[Variant], record: RunRecord | None):
        """Refuses weights to begin with whose shapes the models do not have."""
        config = self.config
        for v in models:
            if config.training.adapter_rank:
                base = self._base(record)
                starting_point.refuse_other_base(base, v.model)
                say(f"{v.name:>6}: adapters on {base.words}")
                if config.run.prune_to == "pattern":
                    pattern_pruning.refuse_other_layouts(base.model, base.params, v.model)
            elif config.run.init_from and not record:
                weights = self._weights()
                say(_beginning_words(v.name, weights, v.phase_specs[0].model))
                model = v.phase_specs[0].model
                growth.refuse_other_shapes(weights.model, model)
                if config.run.prune_to == "pattern":
                    pattern_pruning.refuse(weights.model, weights.params, model)

    def _corpus(self, texts: Sequence[str] | None, record: RunRecord | None) -> Corpus:
        """The corpus of the texts, or of the config; a resumed run keeps the revision of a dataset
        on the hub."""
        if texts is None:
            streams = record is not None and hub.PREFIX in record.corpus
            return corpus_of(self.config.data, record.corpus if record and streams else "")
        if self.config.data.loss == "answers":
            raise UserError("data.loss=answers reads examples of data.corpus; give it, not texts.")
        return corpus_of_texts(texts)

    def _tokenizer(self, corpus: Corpus, resume: bool) -> Tokenizer:
        """The tokenizer of the weights to begin with, or of the config."""
        named = self.config.data.tokenizer not in KINDS
        if resume and (self.config.run.init_from or corpus.streamed or named):
            return Tokenizer.load(self.folder / run_files.TOKENIZER)
        if not self.config.run.init_from:
            return tokenizer_of(self.config, corpus)
        base = starting_point.read_for(self._beginning).tokenizer
        if not self.config.data.extend_vocabulary:
            return base
        tokenizer = vocabularies.learned(base, corpus, self.config.data, cache.FOLDER)
        rows = len(base.tokens), len(tokenizer.tokens) - len(base.tokens)
        self.config = self.config.change(training__new_rows=rows)
        return tokenizer

    @property
    def _beginning(self) -> RunConfig:
        """The config, with the model of `run.init_from` that a resumed run began with."""
        variant = (self._began or {}).get("variant")
        return self.config.change(run__init_variant=variant) if variant else self.config

    def _weights(self) -> StartingPoint:
        """The weights to begin with, with rows for the tokens that the run adds."""
        start = starting_point.read_for(self._beginning)
        if not self.config.data.extend_vocabulary:
            return start
        return starting_point.with_vocabulary(start, self.tokenizer)

    def _compiled(self, models: list[Variant], data: TrainingData) -> dict[str, list[Compiled]]:
        programs: dict[str, list[Compiled]] = {}
        shared: dict = {}
        for v in models:
            say(f"{v.name:>6}: compiling")
            change = change_of(v.evolution, v.training)
            with self.clock.during("compile"):
                programs[v.name] = compile_programs(
                    v.phase_specs, v.training, data, v.evolution, shared, self.executor, change
                )
        return programs

    def _planned(self, models, programs, data) -> list[Variant]:
        """The models with the steps that the config says, or that fit into its minutes."""
        with self.clock.during("compile"):
            steps = settling.planned_steps(self.config, models, programs, data, self.executor)
        steps = collectives.broadcast(steps)
        models = [v.with_steps(steps[v.name]) for v in models]
        _refuse_unfit_steps(models)
        return models

    def _new_record(self, models, corpus, tokenizer, data) -> RunRecord:
        start = dict(self._weights().provenance) if self.config.run.init_from else None
        if start and self.config.data.extend_vocabulary:
            base = starting_point.read_for(self._beginning).tokenizer
            start["vocabulary"] = vocabularies.measured(base, tokenizer, corpus)
        record = RunRecord(
            experiment=self.experiment,
            command=self.command,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            versions=_versions(),
            machine=f"{self.chip.name} ({platform.machine()})",
            corpus=corpus.name,
            corpus_hash=corpus.content_hash,
            tokenizer=tokenizer.content_hash,
            vocab_size=tokenizer.vocab_size,
            steps={v.name: v.training.steps for v in models},
            init_from=start,
            teacher=dict(data.teacher.source) if data.teacher else None,
            code=run_folder.code_facts(),
            host=socket.gethostname(),
            seed=self.config.training.seed,
            rounded_weights=False,
        )
        return RunRecord(**record.to_json())  # The report shows it, without secrets.

    def _trainer(
        self,
        v: Variant,
        data: TrainingData,
        programs: list[Compiled],
        progress: Progress,
        record: RunRecord,
    ) -> Trainer:
        config, executor = self.config, self.executor
        eval_every = config.run.eval_every or max(1, v.training.steps // EVALUATIONS_A_RUN)

        def mfu(trainer, speed):
            dtype = trainer.model.compute_dtype
            return cost.mfu(trainer.token_flops, speed, self.chip, dtype, devices=executor.devices)

        every = eval_every, config.run.checkpoint_every or 2 * eval_every
        names = trackers.tracker_names(config.run.trackers)
        mirror = self.mirror / v.name / "checkpoints" if self.mirror else None
        return Trainer(
            v,
            self.folder / v.name,
            data,
            programs,
            hooks.usual(
                *every,
                v.training.skip_spikes,
                record=hooks.Record(mfu, progress.note, UserMetrics(self.user_metrics)),
                budget=self._budget(v),
                change=change_of(v.evolution, v.training),
                last=[Show(progress, *every)],
            ),
            executor=executor,
            start=self._start(v, data),
            base=self._frozen(v, record),
            clock=self.clock,
            checkpoints=functools.partial(
                Checkpoints, mirror=copied_to(mirror) if mirror else None
            ),
            metrics=functools.partial(MetricsWriter, tracker_names=names, config=config.to_json()),
        )

    def _budget(self, v: Variant) -> hooks.Hook | None:
        """Keeps a model to its minutes; None where its number of steps is given, or decides more
        than the learning rate: when layouts, layers or the model change, or a rate falls."""
        config = self.config
        moves = v.evolution.method != "static" or v.training.schedule == "wsd"
        if config.training.steps or moves or self.executor.depth != FULL_DEPTH:
            return None
        return TimeBudget(60 * config.run.minutes)

    def _advance(self, trainers: list[Trainer], stop, goodput_log: goodput.GoodputLog) -> None:
        """Trains all to the end, or until `stop()`; saves."""
        goodput_log.write()

        def alert(text):
            for trainer in trainers:
                trainer.alert("stall", text)

        settings = self.config.run
        profile = goodput.StepProfile(self.folder, settings.profiled_steps)
        with contextlib.ExitStack() as stack:
            stack.callback(profile.close)
            stack.enter_context(stall_alerts(self.clock, alert, settings.stall_alert))
            if settings.profile_server and collectives.is_first():
                post = {"POST": self._trace_on_request}
                stack.enter_context(loopback.served(settings.profile_server, post))
            profile.update(trainers[0].step)
            for _ in advance_side_by_side(trainers, stop):
                profile.update(trainers[0].step)
                self._check_folder()
                goodput_log.write(throttle=True)

    def _trace_on_request(self, path, query):
        if path != "/trace":
            return None
        try:
            seconds = float(query.get("seconds", "5"))
        except ValueError:
            seconds = 0.0
        return "text/plain", goodput.trace_now(self.folder, seconds) + "\n"

    def _start(self, v: Variant, data: TrainingData) -> Callable[[], TrainState] | None:
        """Makes the state before the first step from `run.init_from`, where that names weights; a
        resumed run calls it only where it has no checkpoint."""
        if not self.config.run.init_from:
            return None

        def initial():
            run, calibration = self.config.run, []
            start = self._weights()
            if v.training.adapter_rank:
                return starting_point.adapter_state_from(start, v.model, v.training, self.executor)
            if run.prune_by != "weights" and v.model.partial_projections:
                batches = map(data.train.__getitem__, itertools.count())
                micro_batches = v.training.micro_batches
                calibration = run_start.calibration(batches, run.prune_batches, micro_batches)
            model = v.phases[0].model
            return starting_point.initial_state_from(
                start, model, v.training, self.executor, calibration, run.prune_by, run.prune_to
            )

        return initial

    def _base(self, record: RunRecord | None) -> StartingPoint:
        """Returns the weights that adapters freeze; those of its start for a resumed run."""
        if record:
            return starting_point.read_base(record, self.folder)
        return self._weights()

    def _frozen(self, v: Variant, record: RunRecord) -> FrozenBase | None:
        if not v.training.adapter_rank:
            return None
        source = {name: (record.init_from or {}).get(name) for name in ("path", "weights")}
        read = lambda: starting_point.frozen_base(self._base(record), v.model, v.training)  # noqa: E731
        return FrozenBase(source, read)


def _close(trainer, kind, error, trace) -> None:
    """Closes a trainer; where an error came in one of several processes, the others are told of it
    instead of being waited for."""
    if kind is None or jax.process_count() == 1:
        trainer.close()


def _beginning_words(name, start, model) -> str:
    """What a model begins with, and the share of its projections' weights that it keeps."""
    before, after = memory.matrix_count(start.model), memory.matrix_count(model)
    pruned = f", pruned to {after / before:.1%} of its projections' weights"
    return f"{name:>6}: begins with {start.words}{pruned * (after < before)}"


def _say_all(sentences):
    for sentence in sentences:
        say(f"note: {sentence}")


def _say_allocation(variant):
    if variant.model.weight_words:
        sequence = variant.training.sequence
        flops = lambda model: cost.flops_per_token(model, sequence).sections  # noqa: E731
        say(allocation_table(variant.model, flops))


def _isolated_features(models):
    """Yields a sentence for each model that is cut into parts which never meet."""
    for v in models:
        if v.training.adapter_rank:  # An adapter mixes all features.
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
