"""Checks a case: all relations that it has time for, or named ones."""

import dataclasses
import random
import shutil
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from sparse_dataflow.data import cache
from sparse_dataflow.evaluation import run_files
from storm import drawing
from storm.case import Case
from storm.places import MODELS, Places
from storm.relations import COSTS, load
from storm.scene import Scene
from storm.world import Inapplicable, World, Wrong

SECONDS = 20.0
"""Of the processor for a case."""

LARGE, MOST_LARGE = 5, 3
"""Seconds of relations of which a few are checked first, and how many."""

HOLDS, INAPPLICABLE, WRONG = "holds", "says nothing", "wrong"


@dataclasses.dataclass
class Outcome:
    """What a case showed.

    Attributes:
      results: relation -> HOLDS, INAPPLICABLE or WRONG.
      words: of the relation that is wrong; its trace where it broke in another way.
      seconds: of the processor.
    """

    case: Case
    results: dict[str, str]
    words: dict[str, str]
    seconds: float

    @property
    def wrong(self) -> list[str]:
        """The relations that do not hold."""
        return [name for name, result in self.results.items() if result == WRONG]


def checked(
    case: Case, shared: Path, folder: Path, names: Sequence[str] = (), seconds: float = SECONDS
) -> Outcome:
    """Checks a case in a new folder, which is removed before and after.

    Args:
      names: of relations; if empty, all in a drawn order as far as the seconds go, and a large one
        in any case.
    """
    relations = load()
    order = [*names] or sorted(relations)
    first: list[str] = []
    if not names:
        draw = random.Random(str(case))
        draw.shuffle(order)
        # Else those that train once more would seldom have the time.
        first = [name for name in order if COSTS[name] >= LARGE][:MOST_LARGE]
        order.sort(key=lambda name: (COSTS[name] > 0) + (name not in first))
    start = time.process_time()
    results: dict[str, str] = {}
    words: dict[str, str] = {}
    shutil.rmtree(folder, ignore_errors=True)  # Of a storm that was killed.
    try:
        world = World(case, shared, folder)
        for name in order:
            left = seconds - (time.process_time() - start)
            if not names and results and left < COSTS[name] and name not in first[:1]:
                continue
            try:
                relations[name](world)
                results[name] = HOLDS
            except Inapplicable as reason:
                results[name] = INAPPLICABLE
                words[name] = str(reason)
            except Wrong as error:
                results[name], words[name] = WRONG, str(error)
            except Exception as error:
                results[name] = WRONG
                words[name] = f"{type(error).__name__}: {error}\n{traceback.format_exc()[-3000:]}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(case, results, words, time.process_time() - start)


def drawn(seed: str, number: int, shared: Path, folder: Path):
    """Returns the case of a number, and the refusals of drawing it."""
    draw = random.Random(f"{seed}:{number}")
    return drawing.draw_case(draw, Places(shared, folder, Scene()))


def prepare(shared: Path, folder: Path) -> None:
    """Makes the models that runs begin with: a run of a dense model, and two exports."""
    import sparse_dataflow as sd

    if all((shared / name).exists() for name in MODELS):
        return
    shared.mkdir(parents=True, exist_ok=True)
    world = World(Case.of({"run.twin": "yes"}), shared, folder)
    run = world.train("base")
    sd.save(run.model("sparse"), shared / "sparse.new", "sparse")
    sd.save(run.model("dense"), shared / "dense.new", "dense")
    dense = World(Case.of({"sparsity.projections": "none"}), shared, folder / "dense").train("base")
    dense.folder.rename(shared / "run.new")
    for name in MODELS:
        (shared / f"{name}.new").rename(shared / name)
    shutil.rmtree(folder, ignore_errors=True)


def results_of(case: Case, shared: Path, folder: Path, cache_folder: Path) -> dict:
    """Returns what a run of a case gives, as JSON, with caches in a folder that others use too."""
    start = time.process_time()
    world = World(case, shared, folder)
    cache.FOLDER = cache_folder
    if world.refusal:
        return {"refused": str(world.refusal[0]).replace(str(folder), "")}
    losses = [
        [row["kind"], row["step"], row["loss"]] for row in world.run.metrics() if "loss" in row
    ]
    config = run_files.read_config(world.run.folder)
    record = run_files.read_record(world.run.folder, config)
    return {
        "tokenizer": record.tokenizer,
        "losses": repr(losses),
        "seconds": time.process_time() - start,
    }
