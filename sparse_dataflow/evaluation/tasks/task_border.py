"""The border to lm-eval's task files in YAML, which somebody else may have written.

lm-eval reads copies of them, which have no code and include nothing. Their YAML, templates and
regular expressions run in a process with limits. Its own files, a part of that package, it reads as
they are.
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
import re
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

import lm_eval.tasks
import lm_eval.utils
import yaml
from lm_eval.api import metrics, registry
from lm_eval.config.task import TaskConfig
from lm_eval.filters import extraction

from sparse_dataflow.data import template_sandbox
from sparse_dataflow.data.template_child import CODE
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError, escaped, first_line

OF_LM_EVAL = Path(lm_eval.tasks.__file__).resolve().parent
"""The folder of lm-eval's own task files."""

MOST_BYTES = template_sandbox.MOST_YAML
"""Bytes of a YAML file."""

_TRUST = "if you trust it, add --trust_tasks"
_FIELDS = {*(field.name for field in dataclasses.fields(TaskConfig)), "group", "group_alias",
           "aggregate_metric_list", "task_list", "class"}  # fmt: skip
_DATASET_FIELDS = ("data_files", "data_dir", "field", "revision", "delimiter", "sep")
_MOST = {"repeats": 1000, "num_fewshot": 1000, "k": 1000}
_MOST_NUMBER = 2**31
"""Largest numbers of a task's fields, by their names, and of others."""

_SHOWN = 5
_LOG = logging.getLogger(__name__)
_NUMBERS = itertools.count()


@functools.cache
def _copies() -> tempfile.TemporaryDirectory:
    """The folder of the copies, until the process ends."""
    return tempfile.TemporaryDirectory(prefix="sparse_dataflow-tasks-")


def copied(place: Path) -> Path:
    """Returns a copy of a task file, or of a folder of them, that lm-eval may read.

    A task that runs code is refused when lm-eval loads it. Another file of a folder that cannot be
    used is left out with a line in the log.

    Raises:
      UserError: the only file is no task file.
    """
    target = Path(_copies().name, str(next(_NUMBERS)))
    target.mkdir()
    if place.is_file():
        root, paths = place.parent, [place]
    else:
        root, paths = place, sorted(place.rglob("*.yaml"))
    for path in paths:
        copy = target / path.relative_to(root).with_suffix(".yaml")
        try:
            content = yaml.safe_dump(_checked(fields(path, root), path), sort_keys=False)
        except (UserError, OSError, ValueError) as error:
            words = f"{path} is no task file: {first_line(error).rstrip('.')}"
            if path == place:
                raise UserError(f"{words}.") from None
            _LOG.warning("%s", escaped(words))
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(content)
    return target / place.with_suffix(".yaml").name if place.is_file() else target


def fields(path: Path, root: Path, including: tuple[Path, ...] = ()) -> json_files.JsonObject:
    """Returns the fields of a task file and of what it includes, as lm-eval merges them.

    Args:
      path: the file.
      root: folder that it and what it includes must lie in, or in lm-eval's own.
      including: the files that include it.

    Raises:
      UserError: it is no YAML of fields, or leads out of its folder.
      OSError, ValueError: it cannot be read.
    """
    if not any(path.resolve().is_relative_to(each) for each in (root.resolve(), OF_LM_EVAL)):
        raise UserError(f"{path} is outside of its folder {root}; {_TRUST}")
    if path.resolve() in including or len(including) > json_files.MAX_DEPTH:
        raise UserError("it includes itself or too many files")
    value = template_sandbox.yaml_value(json_files.read_bytes(path, MOST_BYTES))
    if not isinstance(value, dict):
        raise UserError("it has no fields")
    included = value.pop("include", [])
    merged: json_files.JsonObject = {}
    for name in included if isinstance(included, list) else [included]:
        if not isinstance(name, str):
            raise UserError("its include is no name of a file")
        merged |= fields(path.parent / name, root, (*including, path.resolve()))
        merged.pop("task_list", None)
    return merged | value


def _checked(given: json_files.JsonObject, path: Path) -> json_files.JsonObject:
    """Returns the fields of a task, or those that say why it is not loaded.

    Raises:
      UserError: it has no name.
    """
    for name, kinds in (("task", str | list), ("group", str)):
        if not isinstance(given.get(name, ""), kinds):
            raise UserError(f"its {name} is no name")
    if not {"task", "group"} & given.keys():
        raise UserError("it names no task or group")
    name = given.get("group") or given["task"]
    try:
        _refuse_code(given, path)
    except UserError as error:
        if not isinstance(name, str):
            raise
        # lm-eval quotes an output type that it does not know, before it fetches any data.
        return {"task": name, "output_type": str(error)}
    return given


def _refuse_code(value, path):
    """Refuses a value in which lm-eval would find code or another file."""
    if isinstance(value, list):
        for each in value:
            _refuse_code(each, path)
    elif isinstance(value, dict):
        if CODE in value:
            raise UserError(f"the task file {path} runs Python code of its own ({CODE}); {_TRUST}")
        metrics_of = value.get("metric_list")
        for each in metrics_of if isinstance(metrics_of, list) else ():
            word = each.get("metric") if isinstance(each, dict) else each
            legal = isinstance(word, str) and word in registry.METRIC_REGISTRY
            if not legal or (isinstance(each, dict) and each.get("hf_evaluate")):
                raise UserError(f"the metric {word} is code of its own; {_TRUST}")
        if ".yaml" in str(value.get("use_prompt")):
            raise UserError("use_prompt names a file; put its templates into the task's own file")
        _refuse_fields(value)
        for each in value.values():
            _refuse_code(each, path)


def _refuse_fields(value: json_files.JsonObject) -> None:
    """Refuses fields that write, fetch code or count, beyond what a task needs.

    Raises:
      UserError: naming the field.
    """
    unknown = [name for name in value if name not in _FIELDS] if "task" in value else []
    if unknown:
        shown = ", ".join(map(str, unknown[:_SHOWN])) + ", ..." * (len(unknown) > _SHOWN)
        raise UserError(f"a task has no fields {shown}; {_TRUST}")
    kwargs = value.get("dataset_kwargs")
    for name in kwargs if isinstance(kwargs, dict) else ():
        if name not in _DATASET_FIELDS:
            legal = ", ".join(_DATASET_FIELDS)
            raise UserError(f"dataset_kwargs has {name}; legal: {legal}; {_TRUST}")
    for name, each in value.items():
        most = _MOST.get(name, _MOST_NUMBER)
        numbers = each if isinstance(each, list) else [each]
        for number in numbers:
            if isinstance(number, int | float) and not -_MOST_NUMBER <= number <= most:
                raise UserError(f"{name} has {str(number)[:20]}; legal: up to {most:,}")


class _Template:
    """A template of a task."""

    def __init__(self, text: str):
        self._text = text

    def render(self, **values: object) -> str:
        """Returns its text, made in a process with limits."""
        return template_sandbox.render(self._text, values, chat=False)


class _Environment:
    """What lm-eval renders templates with."""

    from_string = staticmethod(_Template)


class _Expressions:
    """What lm-eval searches with in the place of the module `re`."""

    def __getattr__(self, name: str) -> object:
        return getattr(re, name)  # Flags, and what runs no expression.

    compile = staticmethod(template_sandbox.Regex)

    @staticmethod
    def findall(pattern: str, text: str, flags: int = 0) -> list:
        """Returns all matches."""
        return template_sandbox.Regex(pattern, flags).findall(text)

    @staticmethod
    def split(pattern: str, text: str, flags: int = 0) -> list:
        """Returns the texts between matches."""
        return template_sandbox.Regex(pattern, flags).split(text)

    @staticmethod
    def sub(pattern: str, replacement: str, text: str, count: int = 0, flags: int = 0) -> str:
        """Returns a text with matches replaced."""
        return template_sandbox.Regex(pattern, flags).sub(replacement, text, count)


def bound_templates() -> None:
    """Makes lm-eval run the templates and regular expressions of tasks where they end."""
    lm_eval.utils.env = _Environment()
    for module in (extraction, metrics):
        module.re = _Expressions()


@contextlib.contextmanager
def failures(activity: str, advice: str = "") -> Iterator[None]:
    """Makes each failure of lm-eval in a block a UserError: "ACTIVITY (reason). ADVICE".

    Errors of what lm-eval calls back in the module of the block, as a model, pass.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # A hub, a network, a disk or a file can raise anything.
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        modules = [str(frame.f_globals.get("__name__")) for frame in frames if frame]
        modules = [name for name in modules if name != __name__]
        if modules[0] in modules[1:]:
            raise
        words = f"{activity} ({first_line(error).rstrip('.')}). {advice}"
        raise UserError(words.strip()) from error
