"""The study of structure: searches every arm, measures it, and is resumed."""

import functools
from pathlib import Path

from sparse_dataflow.commands.request import Request
from sparse_dataflow.core.messages import say
from sparse_dataflow.files import folders

from .. import engine, memory_check, study
from ..engine import Results
from ..study import HELD_OUT, TUNING
from . import design as designs
from . import report
from .search import MEASURE, Search, words

OWNER = "structure_search"
STUDY = Path(__file__).parents[2] / "results" / "structure_pico" / "study.toml"
"""The study of this project; a wheel has it too."""
WINDOWS = 64
"""Windows of a periodic evaluation."""


def search_structures(request: Request, options) -> int:
    """Trains what a study file says, then writes tables and picture; returns the exit status.

    Args:
      request: the corpus.
      options: of `experiments.structure_search`.

    Raises:
      UserError: before the first step where it can be known then.
    """
    design = designs.read(options.study or STUDY)
    folder = Path(options.out)
    folders.refuse_foreign(folder, OWNER)
    request = request.with_defaults({"scale": design.scale})
    base = study.prepare(request, (), design.settings, tuned=True)
    study.keep_settings(folder, base.config, OWNER)
    search = Search(base, design)
    for cell in search.cells:
        for trial in search.candidates(cell):
            models = [search.variant(trial)]
            memory_check.refuse_too_large(base.config, models, base.chip.memory_bytes)
    body = functools.partial(_train, search, folder)
    return engine.resumable(folder, body)


def _train(search, folder, stop) -> bool:
    """Returns whether everything was trained; what is known is written in any case."""
    known = functools.partial(_known_runs, search, stop)
    results = engine.train_all(folder, known, note=functools.partial(progress, search))
    lines = engine.read_lines(folder / engine.LINES)
    so_far = {line["name"]: line["result"] for line in lines}
    say(report.write(search, so_far, folder, search.base.chip.name))
    return results is not None


def _known_runs(search, stop, results):
    """Yields the trials that are known so far as the engine trains them."""
    for trial in search.known(results):
        record = {
            "budget": trial.cell.budget,
            "optimizer": trial.cell.optimizer,
            "arm": trial.cell.arm,
            "role": trial.role,
            "share": trial.share,
            "seed": trial.seed,
            "changes": search.changes(trial),
        }
        train = functools.partial(_trained, search, trial, stop)
        programs = trial.cell.arm, trial.cell.optimizer, trial.model, trial.seed
        yield engine.Run(search.name(trial), train, record, programs)


def _trained(search, trial, stop, where, compiled):
    variant = search.variant(trial)
    split = HELD_OUT if trial.role == MEASURE else TUNING
    data = search.base.split_data(variant, split, WINDOWS)
    label = f"{trial.cell.name}, {trial.role}: {words(trial.model)}"
    return engine.train_or_diverge(
        label, variant, data, where, stop, evaluations=1, compiled=compiled
    )


def progress(search: Search, results: Results) -> str:
    """Returns the number of the next training, and the time left by the speed of those so far."""
    text = f"training {len(results) + 1} of {search.total()}"
    seconds = sum(result["seconds"] for result in results.values())
    flops = sum(result["flops"] for result in results.values())
    if flops:
        text += f", about {search.left(results) * seconds / flops / 3600:.1f} h of training left"
    return text
