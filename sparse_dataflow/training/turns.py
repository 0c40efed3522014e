"""Several models trained by turns, so that they share a machine fairly."""

from collections.abc import Callable, Iterator

from sparse_dataflow.distributed import processes
from sparse_dataflow.training.loop import Trainer
from sparse_dataflow.training.metrics import say


def advance_side_by_side(trainers: list[Trainer], stop: Callable[[], bool]) -> Iterator[Trainer]:
    """Advances each trainer by turns until all are finished or `stop()`; yields who advanced.

    The turn goes to whoever has done the smaller part of its own steps, so that a machine whose
    speed drifts is shared fairly. When stopped, every trainer is saved first.
    """
    while running := [t for t in trainers if not t.finished]:
        stopping, *again = processes.any_process(bool(stop()), *(t.save_again for t in running))
        if stopping:
            for trainer in running:
                trainer.save_surely()
                say(f"{trainer.name:>6} saved at step {trainer.step}")
            return
        for trainer in (t for t, wanted in zip(running, again) if wanted):
            trainer.save()
        trainer = min(running, key=lambda t: t.step / t.training.steps)
        trainer.advance()
        yield trainer
    for trainer in trainers:
        trainer.save_surely()
