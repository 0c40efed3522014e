"""The tasks that a command line names: of this project, of lm-eval, or in files.

Needs the extra `eval`.
"""

import collections
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from lm_eval.api.group import Group

from sparse_dataflow.core.messages import say
from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.evaluation.tasks import builtin, lm_eval_tasks, task_border
from sparse_dataflow.evaluation.tasks.items import Item, read_items
from sparse_dataflow.files.errors import UserError

DEFAULT_SHOTS = (0, 1, 5)
"""Numbers of examples in a prompt for a task that has no number of its own."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A task that is ready to be scored.

    Attributes:
      task: lm-eval's task, or group of tasks.
      items: its items; None for a task of lm-eval's own.
      zero_shot_only: whether lm-eval defines it without examples in the prompt.
      own_shots: number of examples that its file gives, the most of a group; None for none.
    """

    task: object
    items: Sequence[Item] | None = None
    zero_shot_only: bool = False
    own_shots: int | None = None

    @classmethod
    def from_lm_eval(cls, task: object) -> "Task":
        """A task or group of lm-eval's own."""
        zero_shot_only = any(
            each.OUTPUT_TYPE == "loglikelihood_rolling" or each.get_config("num_fewshot") == 0
            for each in _singles(task)
        )
        given = [each.get_config("num_fewshot") for each in _singles(task)]
        own = max((number for number in given if number is not None), default=None)
        return cls(task, None, zero_shot_only, own)

    def shots(self, asked: Sequence[int]) -> tuple[int | None, ...]:
        """Returns the numbers of examples to evaluate with; None for its own number.

        Args:
          asked: those of the command line; () for the task's own, else DEFAULT_SHOTS.
        """
        if not asked and self.own_shots is not None:
            return (None,)
        return (0,) if self.zero_shot_only else tuple(asked or DEFAULT_SHOTS)

    @property
    def generates(self) -> bool:
        """Whether text is written, and not scored."""
        return any(each.OUTPUT_TYPE == "generate_until" for each in _singles(self.task))

    def documents(self, count: int) -> list[str]:
        """The document of each of the first `count` items; unknown documents count as distinct."""
        if self.items is None:
            return [str(number) for number in range(count)]
        return [item.document for item in self.items[:count]]

    def chance(self, count: int) -> float | None:
        """The accuracy of guessing, 0 for open answers; None for tasks of lm-eval's own."""
        if self.items is None:
            return None
        each = [1 / n if n > 1 else 0.0 for n in (len(i.choices) for i in self.items[:count])]
        return float(np.mean(each))


def _singles(task):
    """Returns the tasks of a group; a task alone is its own."""
    return task.get_all_tasks() if isinstance(task, Group) else [task]


def named(options, corpus: str) -> dict[str, dict[str, Task] | None]:
    """The tasks that `options.tasks` names, in that order.

    Args:
      options: of `experiments.evaluate`.
      corpus: name of the corpus that the model was trained on.

    Returns:
      Name -> tasks; None for an own task, which `ready` makes.

    Raises:
      UserError: there is no such task, its data cannot be reached, or its file cannot be used.
    """
    project_tasks, manager = builtin.task_names(corpus), None
    if not options.trust_tasks:
        task_border.bound_templates()
    by_name: dict[str, dict[str, Task] | None] = {}
    words = [word.strip() for word in options.tasks.split(",") if word.strip()]
    for name in dict.fromkeys(
        name for word in words for name in (project_tasks if word == "own" else [word])
    ):
        if name in builtin.BUILTIN_TASKS:
            if name not in project_tasks:
                raise UserError(
                    f"The task {name} needs Python source, and {corpus} has its own tasks: "
                    f"{', '.join(project_tasks)}."
                )
            # `ready` makes it: its items are drawn from the held-out documents of a model.
            by_name[name] = None
        elif _is_project_task(name):
            path = Path(os.path.expanduser(name)).absolute()
            items = read_items(path)
            _refuse_unfit(name, items, max(options.num_fewshot or DEFAULT_SHOTS))
            # Each file of BIG-bench is named task.json, in a folder named after the task.
            stem = path.parent.name if path.name == "task.json" else path.stem
            by_name[name] = {stem: Task(lm_eval_tasks.make_task(stem, items), items)}
        else:
            # The manager reads all YAML files of lm-eval, so it is made only where a task needs it.
            manager = manager or lm_eval_tasks.task_manager(
                [word for word in words if not _is_project_task(word)],
                _folders(options.include_path),
                options.trust_tasks,
            )
            harness_tasks = lm_eval_tasks.load_tasks(
                name, manager, project_tasks, trusted=options.trust_tasks
            )
            by_name[name] = {task: Task.from_lm_eval(it) for task, it in harness_tasks.items()}
    if not by_name:
        raise UserError(
            f"--tasks={options.tasks} names no task; legal: own, {', '.join(project_tasks)}, "
            "lm-eval's tasks, YAML files and folders of such tasks, and files of JSON lines."
        )
    names = collections.Counter(task for group in by_name.values() for task in group or ())
    if repeated := [task for task, count in names.items() if count > 1]:
        raise UserError(f"--tasks names the task {repeated[0]} twice; leave one out.")
    return by_name


def _folders(include_path):
    """The folders that --include_path lists."""
    folders = [Path(word).expanduser() for word in include_path.split(",") if word]
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"--include_path={include_path}: {folder} is not a folder.")
    return folders


def _is_project_task(name):
    """Whether a name of --tasks is not lm-eval's."""
    return name == "own" or name in builtin.BUILTIN_TASKS or name.endswith((".jsonl", ".json"))


def ready(
    by_name: Mapping[str, dict[str, Task] | None],
    options,
    corpus: Corpus,
    tokenizer: Tokenizer,
    context: int,
) -> dict[str, Task]:
    """The tasks of `named` with the own ones made.

    Args:
      by_name: as `named` returns them.
      options: of `experiments.evaluate`.
      corpus: the corpus whose held-out documents give the items.
      context: tokens that a prompt may have.

    Raises:
      UserError: no task is left, as the documents give too few items.
    """
    tasks: dict[str, Task] = {}
    for name, group in by_name.items():
        if group is not None:
            tasks |= group
            continue
        say(f"making {options.items} items of {name}")
        items, examples = builtin.make_items(
            name, corpus, tokenizer, context, options.items, options.seed
        )
        if len(items) < 2 or len(examples) < max(options.num_fewshot or DEFAULT_SHOTS):
            say(f"{name} is left out: the documents of {corpus.name} give too few items")
            continue
        tasks[name] = Task(lm_eval_tasks.make_task(name, items, examples), items)
    if not tasks:
        raise UserError(
            f"The documents of {corpus.name} give too few items for --tasks; name others, or lower "
            "--num_fewshot."
        )
    return tasks


def _refuse_unfit(name, items, most_shots):
    """Refuses a file that mixes kinds of items, or has too few for the examples of a prompt."""
    if len({len(item.choices) == 1 for item in items}) > 1:
        raise UserError(f"The task file {name} mixes items of one choice with items of several.")
    # Examples are items that differ from the one that is asked.
    often = max(collections.Counter((i.context, i.choices, i.answer) for i in items).values())
    if len(items) - often < most_shots:
        raise UserError(
            f"The task file {name} has {len(items)} items, too few for {most_shots} different ones "
            "as examples; give --num_fewshot=0, or more items."
        )
