"""The border to lm-eval's task files in YAML, which somebody else may have written.

lm-eval reads copies of them, which have no code and include nothing. Their YAML and their templates
are read and rendered in a process with limits. Its own files, a part of that package, it reads as
they are.
"""

import contextlib
import functools
import itertools
import logging
import re
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval.tasks
import lm_eval.utils
import yaml

from sparse_dataflow.data import template_sandbox
from sparse_dataflow.data.template_child import CODE
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError, escaped, first_line

OF_LM_EVAL = Path(lm_eval.tasks.__file__).resolve().parent
"""The folder of lm-eval's own task files."""

MOST_BYTES = template_sandbox.MOST_YAML
"""Bytes of a YAML file."""

_TRUST = "if you trust it, add --trust_tasks"
_PLAIN_NAME = re.compile(r"\w+")
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


def fields(path: Path, root: Path, including: tuple[Path, ...] = ()) -> dict[str, Any]:
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
    merged: dict[str, Any] = {}
    for name in included if isinstance(included, list) else [included]:
        if not isinstance(name, str):
            raise UserError("its include is no name of a file")
        merged |= fields(path.parent / name, root, (*including, path.resolve()))
        merged.pop("task_list", None)
    return merged | value


def _checked(given: dict[str, Any], path: Path) -> dict[str, Any]:
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
        word = value.get("metric")
        is_name = isinstance(word, str) and _PLAIN_NAME.fullmatch(word) and not Path(word).exists()
        if word is not None and not is_name:
            raise UserError(f"the metric {word} is code of its own; {_TRUST}")
        if ".yaml" in str(value.get("use_prompt")):
            raise UserError("use_prompt names a file; put its templates into the task's own file")
        for each in value.values():
            _refuse_code(each, path)


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


def bound_templates() -> None:
    """Makes lm-eval render the templates of tasks where they run no code and end."""
    lm_eval.utils.env = _Environment()


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
