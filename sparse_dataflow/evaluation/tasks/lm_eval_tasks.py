"""Tasks from items, and tasks of lm-eval by name. Requires the extra `eval`."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from sparse_dataflow.evaluation.harness import quiet
from sparse_dataflow.evaluation.tasks import task_border
from sparse_dataflow.evaluation.tasks.items import Item
from sparse_dataflow.files import json_files, storage
from sparse_dataflow.files.errors import UserError, first_line

STANDARD = (
    *("lambada_openai", "hellaswag", "winogrande", "piqa", "arc_easy", "arc_challenge", "boolq"),
    *("openbookqa", "wikitext"),
)
"""Tasks of lm-eval that papers on small models report; all other lm-eval tasks are legal too."""


def make_task(name: str, items: Sequence[Item], examples: Sequence[Item] = ()) -> ConfigurableTask:
    """Returns an lm-eval task with these items.

    With several choices, an item counts as correct if the correct choice is the most likely one;
    with a single choice, if greedy decoding generates it. The metric is "acc".

    Args:
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
        # Choices begin with their own space (`move_space`).
        "target_delimiter": "",
        "fewshot_delimiter": "\n\n",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
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


def task_manager(
    names: Sequence[str], folders: Sequence[Path] = (), trusted: bool = False
) -> TaskManager:
    """Returns an index of task files in which lm-eval finds `names`.

    Reading all 14,000 files of lm-eval takes many seconds. If each name is a path or the name of
    one task, only the folders of these tasks are read.

    Args:
      names: tasks, groups, tags, YAML files or folders.
      folders: more folders of tasks, whose names have priority.
      trusted: whether the files of these folders may run Python code of their own.
    """
    folders = folders if trusted else [task_border.copied(folder) for folder in folders]
    missing = {n for n in names if not n.endswith((".yaml", ".yml")) and not Path(n).is_dir()}
    paths: list[Path] = list(folders)
    for root in (*folders, task_border.OF_LM_EVAL):
        for path in sorted(root.rglob("*.yaml")) if missing else ():
            if not missing:
                break
            definition = TASK_NAME.search(_content(path))
            if definition and (name := definition[1].decode(errors="replace")) in missing:
                missing.remove(name)
                if root is task_border.OF_LM_EVAL:
                    paths.insert(0, path.parent)
    if missing:
        return TaskManager(include_path=list(folders) or None)
    return TaskManager(include_path=list(dict.fromkeys(paths)), include_defaults=False)


def _content(path: Path) -> bytes:
    """Returns the content of a task file, empty where it cannot be read."""
    try:
        return json_files.read_bytes(path, task_border.MOST_BYTES)
    except (OSError, ValueError):
        return b""


TASK_NAME = re.compile(rb"^[\"']?task[\"']?:[ \t]*[\"']?([^\s\"'#]+)[\"']?[ \t\r]*(?:#.*)?$", re.M)


def load_tasks(
    name: str, manager: TaskManager, builtin: Sequence[str], trusted: bool = False
) -> dict[str, Any]:
    """Loads lm-eval tasks with their data, and the groups that aggregate some of them.

    Args:
      name: a task, group or tag of `manager`, a YAML file, or a folder of YAML files.
      manager: task index of lm-eval.
      builtin: names of the built-in tasks, for error messages.
      trusted: whether task files may run Python code of their own.

    Returns:
      {name: lm-eval task, or a group after its tasks}.

    Raises:
      UserError: there is no such task, its file is damaged or runs code, its data cannot be
        downloaded, or it runs code that the model writes.
    """
    named = name in manager.all_tasks
    path, names = Path(name).expanduser(), [name]
    if not named:
        manager, names = _file_tasks(name, path, manager, builtin, trusted)
    problem = (
        f"The data of the task {name} cannot be downloaded"
        if named
        else f"The tasks in {name} cannot be loaded"
    )
    advice = f"The tasks {', '.join(builtin)} need no network."
    tasks: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    with (
        task_border.failures(problem, advice),
        storage.told(f"loading the task {name}"),
        quiet(),
    ):
        # A group brings its tasks, which a later name may bring again.
        for each in names:
            if each not in tasks and each not in groups:
                loaded = manager.load([each])
                tasks |= loaded["tasks"]
                groups |= loaded["groups"]
    # Such a task would execute what the model wrote, on this machine.
    for task_name, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False):
            raise UserError(
                f"The task {task_name} runs code that the model writes; only lm_eval itself does "
                "so, with --confirm_run_unsafe_code."
            )
    return tasks | {name: group for name, group in groups.items() if group.has_aggregation}


def _file_tasks(name, path, manager, builtin, trusted) -> tuple[TaskManager, list[str]]:
    """Returns an index of the tasks in a YAML file or a folder, and their names."""
    if path.is_dir():
        place = path if trusted else task_border.copied(path)
        manager = TaskManager(include_path=place, include_defaults=False)
        if names := [*manager.all_groups, *manager.all_subtasks]:
            return manager, names
        raise UserError(f"The folder {name} has no YAML file with a task of lm-eval.")
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UserError(f"There is no task file {name}.")
        try:
            fields = task_border.fields(path, path.parent)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is no task file: {first_line(error).rstrip('.')}.") from None
        if isinstance(group := fields.get("group"), str):
            # A group names its tasks, which stand beside it or are lm-eval's.
            return _group_manager(path, fields.get("task"), trusted), [group]
        return manager, [str(path if trusted else task_border.copied(path))]
    legal = [*builtin, *STANDARD, *manager.all_tasks]
    matches = difflib.get_close_matches(name, legal, n=1)
    hint = f" Did you mean {matches[0]}?" if matches else ""
    raise UserError(
        f"There is no task {name!r}.{hint} Legal: {', '.join(builtin)}, the tasks of lm-eval "
        f"such as {', '.join(STANDARD)}, YAML files and folders of such tasks, or files of "
        "JSON lines."
    )


def _group_manager(path: Path, members: object, trusted: bool) -> TaskManager:
    """Returns an index of the group's tasks, which are beside its file or lm-eval's."""
    if not isinstance(members, list) or not all(isinstance(m, str) for m in members):
        members = [path.stem]  # No name of a task: all are read.
    return task_manager(members, [path.parent], trusted)
