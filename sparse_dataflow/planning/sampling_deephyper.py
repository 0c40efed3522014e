"""Searches a space too large to price whole with DeepHyper, as arXiv 2312.12705 did (section 4).

What blocks a layout is told to DeepHyper as a failure by name ("F_memory"), which its surrogate
model takes for the worst throughput seen.  Trials are kept as JSON lines, so a search that was
stopped goes on.
"""

import json
import math
import tempfile
from pathlib import Path

from sparse_dataflow.files import json_files, storage
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.planning.sampling import priced
from sparse_dataflow.planning.search import Request, Space

ASKED_AT_ONCE = 10
"""Trials between two fits of the surrogate model."""


def sample(
    request: Request, choices: Space, trials: int, journal: Path | None = None, seed: int = 0
) -> list[tuple[dict, float]]:
    """As `sampling.sample`, by DeepHyper's Bayesian optimisation.

    Raises:
      UserError: DeepHyper is not installed, or the journal is of another request.
    """
    try:
        from deephyper.hpo import CBO, HpProblem
    except ImportError:
        raise UserError(
            "--engine=deephyper needs DeepHyper: install the extra, pip install "
            "sparse_dataflow[deephyper]; legal without it: auto, exhaustive, optuna."
        ) from None
    made = _kept(journal, request, choices)
    problem = HpProblem()
    for name, levels in choices.levels.items():
        problem.add_hyperparameter((0, max(len(levels) - 1, 1)), name)
    with tempfile.TemporaryDirectory() as folder:
        # It leaves its own records in a folder; ours are in the journal.
        study = CBO(problem, random_state=seed + len(made), log_dir=folder, verbose=0)
        if made:
            study.tell([(at, _objective(speed, blocked)) for at, speed, blocked in made])
        while len(made) < trials:
            told = []
            for at in study.ask(min(ASKED_AT_ONCE, trials - len(made))):
                at = {name: int(index) for name, index in at.items()}
                speed, violations = priced(request, _choice(choices, at))
                blocked = max(violations, key=violations.__getitem__)
                blocked = blocked if violations[blocked] > 0 else ""
                made.append((at, speed, blocked))
                told.append((at, _objective(speed, blocked)))
            study.tell(told)
            _keep(journal, request, made)
    found = {}
    for at, speed, blocked in made:
        if not blocked:
            choice = _choice(choices, at)
            found[tuple(choice.values())] = (choice, speed)
    return sorted(found.values(), key=lambda pair: -pair[1])


def _choice(choices, at):
    """Indices of levels -> their values; of a choice with one level any index is that one."""
    return {name: levels[min(at[name], len(levels) - 1)] for name, levels in choices.levels.items()}


def _objective(speed, blocked):
    return f"F_{blocked}" if blocked else speed


def _kept(journal, request, choices):
    """(indices by choice, speed, what blocks it) of each trial in the journal."""
    if journal is None or not journal.exists():
        return []
    try:
        first, *trials = json_files.read_bytes(journal).splitlines()
        asked = json_files.parse(first)
        if type(asked) is not str:
            raise ValueError("it begins with no request")
        # Trials of another request may lie outside of what this one searches, and be whole.
        ours = asked == f"{request}"
        made = [_trial(json_files.parse(line), choices) for line in trials] if ours else []
    except json_files.MALFORMED as error:
        raise UserError(f"{journal} is damaged ({error}); remove it to search anew.") from None
    if not ours:
        raise UserError(f"{journal} holds trials of another request; name another --out.")
    return made


def _trial(kept, choices):
    at, speed, blocked = kept
    legal = at.keys() == choices.levels.keys() and math.isfinite(speed)
    levels = (max(len(levels), 2) for levels in choices.levels.values())
    indices = (at[name] for name in choices.levels)
    if not legal or not all(type(i) is int and 0 <= i < n for i, n in zip(indices, levels)):
        raise ValueError("a trial lies outside of what is searched")
    if type(blocked) is not str:
        raise ValueError("a trial's reason is no text")
    return at, speed, blocked


def _keep(journal, request, made):
    if journal is not None:
        lines = [json.dumps(one) for one in (f"{request}", *made)]
        storage.replace(journal, ("\n".join(lines) + "\n").encode())
