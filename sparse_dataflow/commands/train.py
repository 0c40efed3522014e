"""The main job: train a GPT, sparse, dense or both side by side, into one run folder."""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax

from sparse_dataflow.commands import branch, devices, program_cache, run_folder
from sparse_dataflow.commands.experiment_modules import started_by
from sparse_dataflow.commands.job import run as job
from sparse_dataflow.commands.job.resolve import Start
from sparse_dataflow.commands.job.run import Run
from sparse_dataflow.commands.planning import described
from sparse_dataflow.commands.preflight import early
from sparse_dataflow.commands.request import Request
from sparse_dataflow.core import collectives
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.training.clock import Clock
from sparse_dataflow.core.training.loop import StepDone
from sparse_dataflow.files import addresses
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import detect as hardware
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.hardware.detect import keep_freed_memory
from sparse_dataflow.monitoring import trackers
from sparse_dataflow.planner import scales
from sparse_dataflow.runs.run_config import RunConfig

_DTYPE = "model.compute_dtype"


def train(
    config: RunConfig,
    *,
    texts: Sequence[str] | None = None,
    resume: bool = False,
    metrics: Mapping[str, Callable[[StepDone], float]] | None = None,
    experiment: str = "train",
    command: Sequence[str] = (),
    clock: Clock | None = None,
) -> Run:
    """Trains the models of a config and writes the run folder: checkpoints, metrics, evaluations
    and the report.

    Ctrl-C, SIGTERM and SIGHUP save and stop; `resume` then continues to the same bits.  With
    several processes all of them call it, after `devices.joined`.

    Args:
      config: what is trained; `config.run.out` is the folder, or an address.
      texts: documents in place of `config.data.corpus`.
      resume: whether to resume the run in the folder.
      metrics: name -> function of a step that returns a number, for metrics.jsonl, the trackers,
        the report and the watch page.  A step has `number`, `numbers` (metric -> float, such as
        "loss" and "gradient_norm"), `rate`, `seconds` and `params`.
      experiment: name of the module that trains.
      command: words of the command line that began it; the record of a run that has none names
        this call.
      clock: tracks what this process is doing; a new one where None.

    Returns:
      The run, finished or stopped.

    Raises:
      UserError: the input is wrong; before the first step where it can be known then.

    Examples:
        >>> out = os.path.join(tempfile.mkdtemp(), "run")
        >>> config = sd.preset("pico").change(sparsity__block=16, run__twin=False, run__out=out)
        >>> config = config.change(training__steps=2)
        >>> texts = [f"Document {number} has a few words. " * 60 for number in range(40)]
        >>> run = sd.train(config, texts=texts)
        >>> run.finished, run.model().step
        (True, 2)
    """
    keep_freed_memory()
    clock = clock or Clock()
    passed = [n for n, value in (("texts", texts), ("metrics", metrics)) if value is not None]
    command = tuple(command) or (run_folder.python_call(config, passed),)
    config = _settled_mirror(config, resume)
    # What can be wrong is refused before the run has a folder.  A resumed run was checked when it
    # began.
    if not resume:
        trackers.tracker_names(config.run.trackers)
        early.refuse_models(config)
        early.refuse_weights(config)
        early.refuse_text(config.data, config.run, has_texts=texts is not None)
    if config.run.keep_programs:
        program_cache.keep_programs()
    mirror = config.run.mirror
    with run_folder.opened(experiment, config.run.out, resume, mirror) as (folder, check):
        start = Start(experiment, command, folder, clock, check, resume, metrics or {}, texts)
        return job.run_job(config, start)


def _settled_mirror(config: RunConfig, resume: bool) -> RunConfig:
    """The config with the mirror that it has wherever it is resumed; a run at an address has it
    there."""
    out, mirror = addresses.normal(config.run.out), addresses.normal(config.run.mirror)
    if addresses.is_address(out):
        if mirror not in ("", out) and not resume:
            raise UserError(
                f"run.mirror={mirror} with --out={out}: a run at an address is copied there alone; "
                "leave run.mirror out, or name a folder with --out."
            )
        mirror = out
    elif mirror and not addresses.is_address(mirror):
        mirror = str(Path(mirror).absolute())
    return config.change(run__out=out, run__mirror=mirror)


def train_experiment(request: Request, experiment: str, *, sparse: bool = True) -> int:
    """The main job of an experiment: joins the processes, settles the config and trains.

    Args:
      request: the command line.
      experiment: its module name, "gpt13b_sparse".
      sparse: whether the model is block-sparse; else the dense one is trained alone.

    Returns:
      The exit status: TEMPORARY where SIGTERM or SIGHUP ended the run after saving, else 0.

    Raises:
      UserError: the input is wrong; before the first step where it can be known then.
    """
    keep_freed_memory()
    clock = Clock()
    if request.chips:
        described.for_machines(request, sparse)
        return 0
    with devices.joined(experiment, request, clock):
        chosen = request.scale == "auto" and not (
            request.resume or request.changes.get("run.init_from")
        )
        on_cpu = jax.default_backend() == "cpu"
        if chosen and on_cpu and _DTYPE not in request.changes and hardware.has_bfloat16_units():
            say("this CPU multiplies bfloat16; for float32 pass --set model.compute_dtype=float32")
            changes = {_DTYPE: "bfloat16", **request.changes}
            request = dataclasses.replace(request, changes=changes)
        chip = detect_chip(request)
        config = request.config(jax.default_backend(), chip.memory_bytes, sparse)
        if request.describe:
            described.for_this_machine(config, chip)
            return 0
        if request.resume:
            run_folder.refuse_other_experiment(request.resume, experiment)
        elif chosen:
            _say_scale(config, chip)
        elif config.run.init_from and "data.corpus" not in request.changes:
            # Whoever brings a model brings a text too, and a forgotten flag would cost the run.
            say(f"no --corpus is given, so it trains on {config.data.corpus}, Python's own sources")
        resume = bool(request.resume)
        command = started_by(experiment), *sys.argv[1:]
        if request.branches:
            collectives.on_first(lambda: branch.make(request.resume, config, command))
        return train(
            config, resume=resume, experiment=experiment, command=command, clock=clock
        ).status


def detect_chip(request: Request) -> Chip:
    """The chip under this process, with the peak of the dtype that the request computes in."""
    dtype = request.changes.get(_DTYPE, "float32")
    return hardware.detect([dtype])


def _say_scale(config, chip):
    """Says which scale was chosen for the memory here."""
    if chip.memory_bytes is not None:
        linears = config.sparsity.linears(config.model)
        say(scales.scale_message(chip.memory_bytes, config.run.scale, linears))
