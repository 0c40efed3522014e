"""One start of a run: resolved, built, trained and reported."""

import dataclasses
import shlex
from pathlib import Path

from sparse_dataflow.commands import address_runs, request, run_folder, run_report
from sparse_dataflow.commands.job.build import build
from sparse_dataflow.commands.job.resolve import Resolved, Start, resolve
from sparse_dataflow.commands.job.train_models import Place, Trained, train_models
from sparse_dataflow.commands.preflight import relay_plan
from sparse_dataflow.core import collectives
from sparse_dataflow.core.messages import say, say_result
from sparse_dataflow.data.examples import as_text
from sparse_dataflow.data.token_ids import with_text
from sparse_dataflow.evaluation import run_files, trained
from sparse_dataflow.evaluation.run_files import RunRecord
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.addresses import is_address
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import starting_point
from sparse_dataflow.monitoring import goodput
from sparse_dataflow.monitoring.metrics import read_metrics
from sparse_dataflow.monitoring.user_metrics import UserMetrics
from sparse_dataflow.reporting.report import PAGE
from sparse_dataflow.runs.run_config import RunConfig


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


def run_job(config: RunConfig, start: Start) -> Run:
    """Trains every model of a config and writes the report; see `train.train`."""
    UserMetrics(start.metrics)  # Refuses illegal ones before any work.
    resolved = resolve(config, start)
    built = build(resolved, start)
    mirror = resolved.config.run.mirror

    def own():
        run_folder.write_own(start.folder, built.record)
        run_folder.mirrored(start.folder, mirror)

    if not start.resume:
        own()  # A resume may still be refused; `train_models` calls it once nothing is.
    place = Place(
        start.folder,
        start.check_folder,
        run_folder.mirror_path(start.folder, mirror),
        resolved.chip,
        resolved.executor,
        start.clock,
        built.record.identity,
        own if start.resume else lambda: None,
    )
    result = train_models(
        resolved.config, built.models, built.data, place, start.metrics, start.resume
    )
    if words := built.data.train.skipped_words:
        say(f"left out of {resolved.corpus.name}: {words}")
    if result.stopped is not None:
        _say_uncopied(place, resolved.config)
        say(f"stopped; resume with: {_resuming_command(resolved.config, start)}")
        return Run(start.folder, resolved.config, False, status=result.stopped)
    headline = _report(resolved, start, result, built.record) if collectives.is_first() else ""
    _say_uncopied(place, resolved.config, fatal=is_address(resolved.config.run.out))
    return Run(start.folder, resolved.config, True, headline)


def _resuming_command(config: RunConfig, start: Start) -> str:
    """Returns the command line or the Python call that resumes a run."""
    place = config.run.out if is_address(config.run.out) else str(start.folder)
    if not start.command[0].startswith(run_files.PYTHON_CALL):
        return f"{start.command[0]} {shlex.join(request.resume_flags(config, place))}"
    given = {"texts": start.texts is not None, "metrics": start.metrics}
    passed = "".join(f", {name}={name}" for name in given if given[name])
    return f"sd.train(config.change(run__out={place!r}){passed}, resume=True)"


def _say_uncopied(place: Place, config: RunConfig, fatal: bool = False) -> None:
    """Says which files of a run its mirror lacks; raises UserError instead where that is fatal."""
    if uncopied := address_runs.finished(place.folder, place.mirror, config.variants):
        if fatal:
            raise UserError(uncopied)
        say(uncopied)


def _report(run: Resolved, start: Start, result: Trained, record: RunRecord) -> str:
    """Writes the report, and says the results; returns the losses in a sentence."""
    trainers, log = result.trainers, result.goodput_log
    for trainer in trainers:
        if spans := trainer.timeline:
            say(f"{trainer.name:>6}: {relay_plan.measured(spans)}")
    with start.clock.during("report"):
        start.check_folder()
        seconds = log.seconds(sum(trainer.seconds for trainer in trainers))
        answers = run.config.data.loss == "answers"
        corpus = (as_text if answers else with_text)(run.corpus, run.tokenizer)
        losses = run_report.write(
            start.folder, record, trainers, corpus, run.tokenizer, run.chip, seconds
        )
        log.write(ended=True)
        say_result(losses)
        say(goodput.summary(seconds))
        say_result(f"report: {start.folder / PAGE}")
    return losses
