"""Items as lm-eval tasks, and lm-eval's own tasks by name. Needs the extra `eval`."""

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
"""lm-eval's tasks that papers on small models report; every other name that it knows is legal."""


def of_items(name: str, items: Sequence[Item], examples: Sequence[Item] = ()) -> ConfigurableTask:
    """An lm-eval task of these items.

    An item with several choices is right where the right one is likeliest ("acc", and "acc_norm"
    per character); one with a single choice where greedy decoding writes it ("acc").

    Args:
      name: of the task.
      items: the questions, at least one; all with one choice or all with more.
      examples: shown before a question where there are to be some; the other items where empty.
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


def by_name(name: str, manager: TaskManager, own: Sequence[str]) -> dict[str, Any]:
    """lm-eval's own task of this name, or the tasks of its group, with their data.

    Raises:
      UserError: lm-eval has no such task, or its data cannot be reached from here; names the own
        tasks, which need nothing.
    """
    if name not in manager.all_tasks:
        import difflib

        near = difflib.get_close_matches(name, [*own, *STANDARD, *manager.all_tasks], n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserError(
            f"There is no task {name!r}.{hint} Legal: {', '.join(own)}, the tasks of lm-eval such "
            f"as {', '.join(STANDARD)}, or a file of JSON lines."
        )
    try:
        with quiet():
            return _leaves(get_task_dict([name], manager))
    except Exception as error:  # Whatever a hub, a network or a disk may raise.
        raise UserError(
            f"The data of the task {name} cannot be reached from here ({first_line(error)}). The "
            f"tasks {', '.join(own)} need no network."
        ) from error


def _leaves(tree) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, task in tree.items():
        found |= _leaves(task) if isinstance(task, dict) else {str(name): task}
    return found
