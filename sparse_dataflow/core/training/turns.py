"""Several models trained in turns, so that they share a machine fairly."""

import itertools
from collections.abc import Callable, Iterator

from sparse_dataflow.cluster import processes
from sparse_dataflow.core.training.loop import Trainer
from sparse_dataflow.core.training.monitoring.metrics import say


def advance_side_by_side(trainers: list[Trainer], stop: Callable[[], bool]) -> Iterator[Trainer]:
    """Advances the trainers in turns until all are finished or `stop()`; yields each after a step.

    The next step goes to the trainer with the smallest fraction of its steps done, so that all see
    the same drift of the machine's speed.  After `stop()`, every trainer is saved.
    """
    while running := [t for t in trainers if not t.finished]:
        stopping, *retries = processes.any_process(
            bool(stop()), *(t.save_retry_due for t in running)
        )
        if stopping:
            for trainer in running:
                trainer.save_and_wait()
                say(f"{trainer.name:>6} saved at step {trainer.step}")
            return
        for trainer in itertools.compress(running, retries):
            trainer.save()
        trainer = min(running, key=lambda t: t.step / t.training.steps)
        trainer.advance()
        yield trainer
    for trainer in trainers:
        trainer.save_and_wait()
