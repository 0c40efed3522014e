"""A case at work: its folder, its config, and what several relations need, made once."""

import contextlib
import functools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import sparse_dataflow as sd
from sparse_dataflow.commands import train, training_data
from sparse_dataflow.commands.job import build
from sparse_dataflow.commands.job.run import Run
from sparse_dataflow.core.training.programs import Compiled, compile_programs
from sparse_dataflow.data import cache, hub
from sparse_dataflow.data.corpora import Corpus
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.evaluation import trained
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import starting_point
from sparse_dataflow.runs.run_config import RunConfig
from storm.case import Case
from storm.machine import with_devices
from storm.places import Places
from storm.scene import scene_of


class Inapplicable(Exception):
    """A relation says nothing about a case."""


class Wrong(AssertionError):
    """A relation does not hold."""


def need(condition: object, why: str = "") -> None:
    """Ends a relation that says nothing about a case."""
    if not condition:
        raise Inapplicable(why)


def check(condition: object, words: str) -> None:
    """Fails a relation."""
    if not condition:
        raise Wrong(words)


class World:
    """A case in a new folder.

    Args:
      shared: folder of what all cases share.
      folder: new folder of this case.
    """

    def __init__(self, case: Case, shared: Path, folder: Path):
        self.case, self.shared, self.folder = case, shared, folder
        self.scene = scene_of(case.values)
        self.places = Places(shared, folder, self.scene)
        folder.mkdir(parents=True)
        self.programs: dict[str, list[Compiled]] = {}
        cache.FOLDER = folder / "cache"
        hub.hub_files = self.places.hub_files

    def devices(self, count: int = 0) -> contextlib.AbstractContextManager[None]:
        """Returns a context with so many devices; those of the case if 0."""
        return with_devices(count or self.case.devices())

    def draw(self, name: str) -> random.Random:
        """Returns the source of what a relation chooses."""
        return random.Random(f"{name} {self.scene.choice}")

    @functools.cached_property
    def config(self) -> RunConfig:
        """The config of the case, whose corpora exist."""
        return self.case.config(self.places)

    def train(
        self,
        name: str,
        case: Case | None = None,
        *,
        stop: int = 0,
        resume: bool = False,
        each: Callable[[object], None] | None = None,
        **changes: object,
    ) -> Run:
        """Trains a case, this one if None, in a folder of this world.

        Args:
          stop: step after which the run gets SIGTERM; 0 for none.
          each: called with each step.
          changes: of its config, as in `RunConfig.change`.
        """
        case = case or self.case
        config = self.config if case == self.case else case.config(self.places)
        # Of its own, as two runs do not share them.
        for path in ("run.mirror", "parallel.server_dir"):
            section, _, setting = path.partition(".")
            if place := getattr(getattr(config, section), setting):
                changes.setdefault(f"{section}__{setting}", f"{place} of {name}")
        config = config.change(run__out=str(self.folder / name), **changes)

        def seen(step):
            if each:
                each(step)
            if step.number == stop:
                os.kill(os.getpid(), signal.SIGTERM)
            return 0.0

        compiled = self.programs.setdefault(name, [])
        build.compile_programs = functools.partial(self._compiled, compiled)
        with with_devices(case.devices()):
            return train.train(config, resume=resume, metrics={"seen": seen})

    def _compiled(self, compiled, *arguments):
        """`compile_programs`, which compiles equal programs of this world once."""
        specs, training, data, evolution, _, *rest = arguments
        programs = compile_programs(specs, training, data, evolution, self._shared, *rest)
        compiled.extend(programs)
        return programs

    @functools.cached_property
    def _shared(self) -> dict:
        return {}

    @functools.cached_property
    def _attempt(self) -> tuple[Run | None, UserError | None, float]:
        _ = self.config
        start = time.process_time()
        try:
            return self.train("run"), None, 0.0
        except UserError as error:
            return None, error, time.process_time() - start

    @property
    def refusal(self) -> tuple[UserError, float] | None:
        """What refused the run, and the seconds of the processor until then; None if it ran."""
        _, error, seconds = self._attempt
        return (error, seconds) if error else None

    @property
    def run(self) -> Run:
        """The run of the case, finished."""
        run, error, _ = self._attempt
        need(run, f"refused: {error}")
        assert run is not None
        check(run.finished, "the run did not finish")
        return run

    @functools.cached_property
    def model(self) -> Model:
        """The trained model of the first variant."""
        return self.run.model()

    def checkpoint(self, variant: str, step: int) -> Model:
        """Returns a checkpoint of the run as a model."""
        if self.config.training.adapter_rank:
            return starting_point.load_run(self.run.folder, variant, str(step))
        return trained.load(self.run.folder, variant, str(step))

    def corpus(self, config: RunConfig | None = None) -> Corpus:
        """Returns the corpus of a config, read anew."""
        return training_data.corpus_of((config or self.config).data)

    def tokenizer(self, config: RunConfig | None = None) -> Tokenizer:
        """Returns the tokenizer of a config, made anew."""
        config = config or self.config
        if config.run.init_from:
            return starting_point.read_for(config).tokenizer
        return training_data.tokenizer_of(config, self.corpus(config))

    def tokens(self, rows: int = 2, length: int = 9) -> np.ndarray:
        """Returns token ids that the model of the run knows."""
        size = self.model.tokenizer.vocab_size
        return np.random.default_rng(self.scene.choice).integers(0, size, (rows, length), np.int32)

    def logits(self, model: Model, tokens: np.ndarray) -> np.ndarray:
        """Returns float64 logits of all positions."""
        return np.asarray(sd.logits(model, tokens), np.float64)
