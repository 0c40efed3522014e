"""Tasks from items, and tasks of lm-eval by name. Requires the extra `eval`."""

import difflib
from collections.abc import Sequence
from typing import Any

import datasets
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager, get_task_dict

from sparse_dataflow.evaluation.harness import quiet
from sparse_dataflow.evaluation.tasks.items import Item
from sparse_dataflow.files.errors import UserError, first_line

STANDARD = (
    *("lambada_openai", "hellaswag", "winogrande", "piqa", "arc_easy", "arc_challenge", "boolq"),
    *("openbookqa", "wikitext"),
)
"""Tasks of lm-eval that papers on small models report; all other lm-eval tasks are legal too."""


def make_task(name: str, items: Sequence[Item], examples: Sequence[Item] = ()) -> ConfigurableTask:
    """Returns an lm-eval task with these items.

    With several choices, an item counts as correct if the correct choice is the most likely one
    ("acc", and "acc_norm" per character); with a single choice, if greedy decoding generates it
    ("acc").

    Args:
      name: name of the task.
      items: at least one question; all with one choice or all with several.
      examples: items for few-shot prompts; the other questions where empty.
    """
    open_ended = len(items[0].choices) == 1
    rows = {"test": _rows(items), **({"examples": _rows(examples)} if examples else {})}
    config = {
        "task": name,
        "custom_dataset": lambda **_: rows,
        "test_split": "test",
        "fewshot_split": "examples" if examples else "test",
        "doc_to_text": lambda row: row["context"],
        "target_delimiter": "",
        "fewshot_delimiter": "\n\n",
        "metadata": {"version": 1.0},
    }
    if open_ended:
        config |= {
            "output_type": "loglikelihood",
            "doc_to_target": lambda row: row["choices"][0],
        }
    else:
        config |= {
            "output_type": "multiple_choice",
            "doc_to_target": lambda row: row["answer"],
            "doc_to_choice": lambda row: row["choices"],
        }
    with quiet():
        return ConfigurableTask(config=config)


def _rows(items):
    return datasets.Dataset.from_list(
        [{"context": i.context, "choices": list(i.choices), "answer": i.answer} for i in items]
    )


def load_tasks(name: str, manager: TaskManager, builtin: Sequence[str]) -> dict[str, Any]:
    """Loads a task of lm-eval, or the tasks of a group, with their data.

    Args:
      name: name of the task or group in lm-eval.
      manager: task index of lm-eval.
      builtin: names of the built-in tasks, for error messages.

    Returns:
      {task name: lm-eval task}.

    Raises:
      UserError: lm-eval has no such task, or its data cannot be downloaded.
    """
    if name not in manager.all_tasks:
        names = [*builtin, *STANDARD, *manager.all_tasks]
        matches = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {matches[0]}?" if matches else ""
        raise UserError(
            f"There is no task {name!r}.{hint} Legal: {', '.join(builtin)}, the tasks of lm-eval "
            f"such as {', '.join(STANDARD)}, or a file of JSON lines."
        )
    try:
        with quiet():
            return _leaves(get_task_dict([name], manager))
    except Exception as error:  # A hub, a network or a disk can raise anything.
        raise UserError(
            f"The data of the task {name} cannot be downloaded ({first_line(error)}). The tasks "
            f"{', '.join(builtin)} need no network."
        ) from error


def _leaves(tree) -> dict[str, Any]:
    tasks: dict[str, Any] = {}
    for name, task in tree.items():
        tasks |= _leaves(task) if isinstance(task, dict) else {str(name): task}
    return tasks
