"""What runs text of somebody else: a child process with limits, `template_child.py`.

One child serves all requests of this process, and is started again when it dies. It ends with this
process. A fork of this process has a child of its own.
"""

import atexit
import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from sparse_dataflow.data import template_child
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError

MEMORY = 2**28
"""Bytes that the child may take: a limit of the operating system where it has one, as on Linux.
On all systems, as on macOS, a child that works for longer is looked at each POLL_SECONDS."""

WALL_SECONDS = 60.0
"""Seconds until an answer. The limit of processor time ends almost all that has no end sooner."""

POLL_SECONDS = 0.05

MOST_YAML = 2**20
"""Bytes of a YAML file."""

_KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH")
"""Variables without which some Pythons do not start; the child has no others."""


class LimitExceeded(UserError):
    """A request took too much time or memory."""


class _Died(LimitExceeded):
    """The child ended, perhaps of what earlier requests left behind, such as memory."""


def render(text: str, values: Mapping[str, object], chat: bool = True, date: str = "") -> str:
    """Returns the text that a template makes of values.

    Args:
      text: the template.
      values: its variables, as JSON has them; others, such as dates, as their text.
      chat: whether it has the settings of `transformers` for conversations, rather than those of
        lm-eval for tasks.
      date: ISO date of its function strftime_now; "" for no such function.

    Raises:
      LimitExceeded: it takes too much time or memory; the text completes "The template ".
      UserError: it is not valid, or refuses the values; as above.
    """
    return _CHILD.answer("render", text, chat, date, dict(values))


def yaml_value(content: bytes) -> object:
    """Returns the value of a YAML file as JSON has it; {template_child.CODE: name} is a function.

    Raises:
      UserError: it is no YAML, has other tags of Python, or is too large.
    """
    if len(content) > MOST_YAML:
        raise UserError(f"it is larger than {MOST_YAML >> 20} MiB")
    text = _CHILD.answer("yaml", content.decode("latin-1"))
    if len(text) > 8 * MOST_YAML:
        raise UserError("its aliases make it too large")
    try:
        return json_files.parse(text)
    except ValueError as error:
        raise UserError(str(error)) from None


class Regex:
    """A regular expression of somebody else, with methods as those of `re.compile`."""

    def __init__(self, pattern: str, flags: int = 0):
        """Compiles it; raises as the methods.

        Raises:
          LimitExceeded: it takes too much time or memory; the text completes "The expression ".
          UserError: it is not valid.
        """
        self._pattern = pattern, int(flags)
        self._call("compile")

    def findall(self, text: str) -> list[str | tuple[str, ...]]:
        """Returns all matches, or the groups of each."""
        rows = self._call("findall", text)
        return [tuple(row) if isinstance(row, list) else row for row in rows]

    def split(self, text: str) -> list[str | None]:
        """Returns the texts between matches, and the groups."""
        return self._call("split", text)

    def sub(self, replacement: str, text: str, count: int = 0) -> str:
        """Returns a text with matches replaced."""
        return self._call("sub", replacement, text, count)

    def _call(self, operation, *arguments):
        return json_files.parse(_CHILD.answer("regex", operation, *self._pattern, *arguments))


class _Child:
    """The child process of this process, started at the first request."""

    def __init__(self, memory: int = MEMORY):
        self._memory = memory
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._end)

    def answer(self, *request: object) -> str:
        """Returns the child's answer to a request.

        Raises:
          LimitExceeded: a child that only had this request took too much, or died.
          UserError: the child refused the request.
        """
        content = json.dumps(request, default=str).encode()
        with self._lock:
            fresh = self._process is None
            try:
                fine, text = self._asked(content)
            except _Died:
                # An older child may have died of earlier requests; a new one only of this one.
                if fresh:
                    raise
                fine, text = self._asked(content)
        if not fine:
            raise UserError(text)
        return text

    def _asked(self, content):
        try:
            process = self._started()
            head = template_child.HEAD
            with contextlib.suppress(BrokenPipeError):  # Reading says why.
                _write(process.stdin.fileno(), head.pack(True, len(content)) + content)
            deadline = time.monotonic() + WALL_SECONDS
            fine, size = head.unpack(self._read(process, head.size, deadline))
            if size > template_child.MOST_BYTES:
                raise LimitExceeded("its process gave an answer that is too long")
            return fine, self._read(process, size, deadline).decode("utf-8", "surrogatepass")
        except BaseException:  # An interrupt as well: its answer is not that of the next request.
            self._end()
            raise

    def _started(self) -> Any:
        if self._process is None:
            packages = [importlib.util.find_spec(n) for n in ("jinja2", "markupsafe", "yaml")]
            folders = {str(Path(p.origin).parents[1]) for p in packages if p and p.origin}
            command = [sys.executable, "-I", "-S", template_child.__file__, str(self._memory)]
            kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
            try:
                self._process = subprocess.Popen(
                    [*command, *sorted(folders)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    bufsize=0,
                    env=kept,
                    start_new_session=True,  # Ctrl-C is for this process.
                )
            except (OSError, ValueError) as error:
                raise UserError(
                    f"its process, {sys.executable or 'Python'}, cannot be started: {error}"
                ) from error
        return self._process

    def _read(self, process, size, deadline) -> bytes:
        content = b""
        while len(content) < size:
            # Looks at the memory only while the child takes long.
            while not select.select([process.stdout], [], [], POLL_SECONDS)[0]:
                with contextlib.suppress(psutil.Error):
                    if psutil.Process(process.pid).memory_info().rss > self._memory:
                        raise _Died(_too_large(self._memory))
                if time.monotonic() > deadline:
                    raise LimitExceeded(f"it takes more than {WALL_SECONDS:.0f} seconds")
            piece = os.read(process.stdout.fileno(), min(2**20, size - len(content)))
            if not piece:
                raise self._death(process)
            content += piece
        return content

    def _death(self, process) -> LimitExceeded:
        status = process.wait()
        if status == -signal.SIGXCPU:
            seconds = template_child.CPU_SECONDS
            return LimitExceeded(f"it takes more than {seconds} seconds of processor time")
        if status == template_child.OUT_OF_MEMORY:
            return _Died(_too_large(self._memory))
        return _Died(f"its process ended with status {status}")

    def _end(self):
        """Ends the child."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            _close(process)

    def _forget(self):
        """In a fork: leaves the child to the process that started it."""
        process, self._process = self._process, None
        self._lock = threading.Lock()  # Another thread may have held it.
        if process is not None:
            process.returncode = 0  # It is no child of this process, and is not waited for.
            _close(process)


def _write(descriptor, content):
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _close(process):
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()


def _too_large(memory):
    return f"it takes more than {memory >> 20} MiB of memory"


_CHILD = _Child()
