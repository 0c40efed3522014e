"""The border to lm-eval's task files in YAML, which somebody else may have written.

lm-eval reads YAML files, what they include and their templates here, within bounds. Its own files,
a part of that package, are read as they are.
"""

import contextlib
import logging
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import jinja2.sandbox
import lm_eval.api.task
import lm_eval.tasks
import lm_eval.tasks._factory
import lm_eval.tasks._index
import lm_eval.tasks._yaml_loader
import lm_eval.tasks.manager
import lm_eval.utils
import yaml

from sparse_dataflow.data.template_sandbox import TemplateSandbox
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError, escaped, first_line

OF_LM_EVAL = Path(lm_eval.tasks.__file__).resolve().parent
"""The folder of lm-eval's own task files."""

MOST_BYTES = 2**20
"""Bytes of a YAML file and what it includes."""

MOST_VALUES = 10**5
"""Values of a YAML file once its aliases are written out."""

_TRUST = "add --trust_tasks"
_READERS = (lm_eval.tasks._factory, lm_eval.tasks._index, lm_eval.tasks.manager)
_FUNCTION = "!function"
_PLAIN_NAME = re.compile(r"\w+")
_LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def guarded(trusted: bool = False) -> Iterator[None]:
    """Makes lm-eval read task files inside the block within bounds.

    A file of a folder that cannot be read is left out with a line in the log, as lm-eval does
    without one.

    Args:
      trusted: whether task files may run Python code of their own.
    """
    load, metric, left_out = lm_eval.tasks._yaml_loader.load_yaml, lm_eval.api.task.get_metric, []

    def checked_load(path, *, resolve_func=True, recursive=True):
        try:
            _check(Path(path), trusted or not resolve_func, [], load)
            return load(path, resolve_func=resolve_func, recursive=recursive)
        except Exception as error:
            if not resolve_func:
                left_out.append(f"{path} is no task file: {first_line(error)}")
            raise

    def checked_metric(name, *arguments):
        if not trusted and (not _PLAIN_NAME.fullmatch(str(name)) or Path(name).exists()):
            raise UserError(f"the metric {name} is code of its own; if you trust it, {_TRUST}")
        return metric(name, *arguments)

    lm_eval.api.task.get_metric = checked_metric
    for module in _READERS:
        module.load_yaml = checked_load
    try:
        yield
    finally:
        lm_eval.api.task.get_metric = metric
        for module in _READERS:
            module.load_yaml = load
        for text in left_out:
            _LOG.warning("%s", escaped(text))


def fields(path: Path) -> dict:
    """Returns the fields of a task file, with names in the place of functions; none if damaged."""
    load = lm_eval.tasks._yaml_loader.load_yaml
    try:
        _check(path, True, [], load)
        return load(path, resolve_func=False)
    except Exception:  # lm-eval, which reads the file next, has the reason.
        return {}


def _check(path, trusted, including, load):
    """Raises an exception if a YAML file, or one that it includes, is not within the bounds.

    Args:
      trusted: whether it may run Python code.
      including: the files that include it, and those that they included before.
      load: lm-eval's reader.
    """
    path = path.expanduser().resolve()
    if OF_LM_EVAL in path.parents or path in including:
        return
    including.append(path)
    if len(including) > json_files.MAX_DEPTH:
        raise ValueError(f"it includes more than {json_files.MAX_DEPTH} files")
    content = json_files.read_bytes(path, MOST_BYTES)
    depth = 0
    for event in yaml.parse(content, Loader=lm_eval.tasks._yaml_loader._Base):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > json_files.MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        if getattr(event, "tag", None) == _FUNCTION and not trusted:
            raise UserError(
                f"the task file {path} runs Python code of its own ({_FUNCTION}); if you trust "
                f"it, {_TRUST}"
            )
    fields = load(path, resolve_func=False, recursive=False)
    if _values(fields, {}, 0) > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES:,} values")
    for name, kinds in (("task", str | list), ("group", str)):
        if not isinstance(fields.get(name, ""), kinds):
            raise ValueError(f"its {name} is no name")
    if not trusted and ".yaml" in str(fields.get("use_prompt")):
        raise UserError("use_prompt names a file; put its templates into the task's own file")
    included = fields.get("include", [])
    for each in included if isinstance(included, list) else [included]:
        _check(path.parent / each, trusted, including, load)


def _values(value, counts, depth):
    """Returns the number of values inside a value, with each alias written out."""
    if not isinstance(value, dict | list | tuple | set):
        return 1
    if depth > json_files.MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    if id(value) not in counts:
        children = [*value, *value.values()] if isinstance(value, dict) else value
        counts[id(value)] = 1 + sum(_values(child, counts, depth + 1) for child in children)
    return counts[id(value)]


def bound_templates() -> None:
    """Makes lm-eval render the templates of tasks in a sandbox, where they run no code and end."""
    before = lm_eval.utils.env
    if not isinstance(before, jinja2.sandbox.SandboxedEnvironment):
        sandbox = TemplateSandbox(
            undefined=before.undefined, keep_trailing_newline=before.keep_trailing_newline
        )
        for name in before.filters.keys() - sandbox.filters.keys():
            sandbox.add_filter(name, before.filters[name])
        lm_eval.utils.env = sandbox


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
