"""What is refused in the first second: before jax is loaded, a plan is made or a corpus is read.

Nothing here loads jax, but for `run.init_from`, whose weights say what shape the model has.  What
needs devices or text is checked where those are known.
"""

import contextlib
import os
from pathlib import Path

from sparse_dataflow.cluster import cluster
from sparse_dataflow.commands import new_folder
from sparse_dataflow.commands.request import Request
from sparse_dataflow.core.training.phases import refuse_unfit
from sparse_dataflow.data import cache
from sparse_dataflow.data.corpus import names
from sparse_dataflow.data.tokenizer import KINDS
from sparse_dataflow.files import addresses
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import detect
from sparse_dataflow.monitoring import trackers
from sparse_dataflow.runs.run_config import DataConfig, RunConfig, RunSettings
from sparse_dataflow.runs.variants import variants


def refuse(request: Request, experiment: str, *, sparse: bool = True) -> None:
    """Refuses a new run for what its command line and the folders that it names say by themselves.

    Args:
      request: the command line.
      experiment: whose run folder it is.
      sparse: whether the model is block-sparse.

    Raises:
      UserError: the text, the weights or the tokenizer are not there, the run folder has other
        files, or the model, its layouts or its evolution are not legal.
    """
    changes = request.changes
    if not request.resume:
        refuse_missing("--init_from", changes.get("run.init_from", ""))
        refuse_missing("training.teacher", changes.get("training.teacher", ""))
    plan = request.parallel
    several = cluster.membership(plan.coordinator, plan.processes, plan.process).processes > 1
    if several and changes.get("run.init_from"):
        return  # Reading weights starts jax, which may start only after the processes joined.
    config = request.config(sparse=sparse)
    if request.chips or request.describe:
        return
    trackers.tracker_names(config.run.trackers)
    # The scale that auto chooses depends on the memory of an accelerator.
    if request.scale != "auto" or config.run.init_from or detect.only_cpu():
        refuse_models(config)
    if several:
        return  # After they joined, a process that fails tells the others.
    if not request.resume or request.branches:
        new_folder.refuse_occupied(config.run.out, experiment, "--out")
        new_folder.refuse_occupied(config.run.mirror, experiment, "run.mirror")
    if not request.resume:
        refuse_weights(config)
        refuse_text(config.data, config.run)


def refuse_models(config: RunConfig) -> None:
    """Refuses models, layouts and evolutions that are not possible.

    Raises:
      UserError: naming the legal values.
    """
    for v in variants(config):
        if config.training.steps:
            refuse_unfit(v.model, v.evolution, v.training.steps)


def refuse_weights(config: RunConfig) -> None:
    """Refuses weights of `run.init_from` that the models of a new run cannot begin with.

    Raises:
      UserError: naming what differs.
    """
    if not config.run.init_from or config.training.freezes:
        return
    from sparse_dataflow.interchange import starting_point

    start = starting_point.read_for(config)
    for v in variants(config, start.model.vocab_size):
        starting_point.refuse_other_model(start.model, v.phase_specs[0].model)


def refuse_text(data: DataConfig, run: RunSettings, has_texts: bool = False) -> None:
    """Refuses a corpus or a tokenizer that is not there, as far as the file system says so.

    Args:
      has_texts: whether texts are given, in place of `data.corpus`.

    Raises:
      UserError: naming what is legal.
    """
    examples = data.loss == "answers"
    for name in filter(None, ("" if has_texts else data.corpus, data.validation)):
        names.refuse_missing(name, cache.FOLDER, examples, data.column)
    if run.init_from:
        return
    if data.tokenizer not in KINDS:
        legal = f"{', '.join(KINDS)}, or a folder that does"
        refuse_missing("data.tokenizer", data.tokenizer, legal)
    has_ids = None if examples or has_texts else names.has_ids(data.corpus, data.column)
    if has_ids is not None:
        names.refuse_other_tokenizer(data.tokenizer, data.corpus, has_ids)


def refuse_missing(flag: str, place: str, legal: str = "a folder that does") -> None:
    """Refuses a path that does not exist; other names may be those of a hub.

    Args:
      flag: of the path.
      place: the path, an address or a name.
      legal: completes "legal: ".

    Raises:
      UserError: naming the flag.
    """
    if not place or addresses.is_address(place) or not place.startswith(("/", ".", "~")):
        return
    with contextlib.suppress(OSError):  # Who reads it says what is wrong with the storage.
        os.stat(Path(place).expanduser())
        return
    raise UserError(f"{flag}={place} does not exist; legal: {legal}.")
