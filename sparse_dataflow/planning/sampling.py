"""Searches a space too large to price whole: Optuna's tree-structured Parzen estimator.

What blocks a layout is a constraint to the sampler (feasible layouts are preferred and infeasible
ones ordered by how far they are off), never a crash.  Trials are kept in a journal, so a search
that was stopped goes on.
"""

from pathlib import Path

import numpy as np

from sparse_dataflow.files.errors import UserError, first_line
from sparse_dataflow.planning import search
from sparse_dataflow.planning.memory import USABLE
from sparse_dataflow.planning.search import Request, Space


def sample(
    request: Request, choices: Space, trials: int, journal: Path | None = None, seed: int = 0
) -> list[tuple[dict, float]]:
    """The legal choices found, fastest first, with their tokens a second and chip.

    Args:
      request: what is asked for.
      choices: the space.
      trials: in all, those of the journal included.
      journal: file that keeps them; None keeps nothing.
      seed: of the sampler; a search that goes on draws from seed + trials made.

    Raises:
      UserError: Optuna is not installed, or the journal is of another request.
    """
    try:
        import optuna
    except ImportError:
        raise UserError(
            "--engine=optuna needs Optuna: install the extra, pip install sparse_dataflow[search]."
        ) from None
    from optuna.storages import JournalStorage
    from optuna.storages import journal as journals

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    asked = f"{request}"
    try:
        storage = JournalStorage(journals.JournalFileBackend(str(journal))) if journal else None
        study = optuna.create_study(
            storage=storage, study_name="layouts", direction="maximize", load_if_exists=True
        )
        other = study.user_attrs.get("request", asked) != asked
        if not other:
            made = len([_choice(choices, trial) for trial in study.trials])
            study.set_user_attr("request", asked)
    except Exception as error:  # Optuna raises whatever a line that is none of its own leads to.
        raise UserError(
            f"{journal} cannot be read ({first_line(error)}); remove it to search anew."
        ) from error
    if other:
        raise UserError(f"{journal} holds trials of another request; name another --out.")
    study.sampler = optuna.samplers.TPESampler(seed=seed + made)

    def objective(trial):
        choice = {
            name: levels[trial.suggest_int(name, 0, len(levels) - 1)]
            for name, levels in choices.levels.items()
        }
        throughput, violations = priced(request, choice)
        for reason, amount in violations.items():
            trial.set_constraint(reason, amount)
        trial.set_user_attr("legal", max(violations.values()) <= 0)
        return throughput

    study.optimize(objective, n_trials=max(trials - made, 0))
    found: dict[tuple, tuple[dict, float]] = {}
    for trial in study.trials:
        if trial.user_attrs.get("legal") and trial.value is not None:
            choice = _choice(choices, trial)
            found[tuple(choice.values())] = (choice, trial.value)
    return sorted(found.values(), key=lambda pair: -pair[1])


def _choice(choices, trial):
    """The levels of a trial, whose journal may be anyone's; those not yet drawn are left out."""
    for name, index in trial.params.items():
        if type(index) is not int or not 0 <= index < len(choices.levels[name]):
            raise ValueError(f"{name} is {index!r} in a trial")
    return {name: choices.levels[name][trial.params[name]] for name in trial.params}


def priced(request: Request, choice: dict) -> tuple[float, dict[str, float]]:
    """Tokens a second and chip; reason in BLOCKS -> above 0 where it blocks, by how much."""
    layout = request.layout(choice)
    seconds = search.explain(request, choice).total
    held = search.held_bytes(request, layout)
    reasons = search.blocks(request, layout, held)
    violations = {name: float(np.any(found)) for name, found in reasons.items()}
    limit = USABLE * request.chip.capacity
    tokens = request.batch * request.sequence / request.chips
    return float(tokens / seconds), {**violations, "memory": float(held / limit - 1)}
