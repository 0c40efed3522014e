"""The process that runs rules of somebody else: templates, YAML and regular expressions.

It is a program of its own, without this package.

`template_sandbox.py` starts it with `python -I -S`, an empty environment and, as arguments, the
bytes that it may take and the folders of the libraries Jinja and YAML. It answers requests on its
standard input.

Limits of the operating system bound what these rules take, whatever they call. The rounds of a
template's loops are counted as well, so that every machine refuses the same templates.
"""

import contextlib
import datetime
import json
import os
import re
import resource
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator

if __name__ == "__main__":
    sys.path += sys.argv[2:]

# Jinja imports `debug` at the first error, when memory may be short.
import jinja2.debug
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

try:
    import yaml
except ImportError:  # Only task files of lm-eval need it, which requires it.
    yaml = None

CPU_SECONDS = 2
"""Seconds of processor time for one request; up to one more, as the limit has whole seconds."""

MOST_ROUNDS = 10**5
"""Rounds of all loops in one rendering."""

MOST_BYTES = 2**26
"""Bytes of a rendered text."""

OUT_OF_MEMORY = 99
"""Exit status after a request that needed more memory than the limit."""

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Marks around what a template says is generated. Unicode reserves these characters for a
program's own use, so no text has them."""

HEAD = struct.Struct("<?Q")
"""Before each message: whether it is an answer rather than an error, and its bytes."""

CODE = "!function"
"""Tag of a value of lm-eval's task files that is a Python function; the field of its place."""

_TEMPLATES = 8
"""Compiled templates that are kept."""


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %} of some templates, which marks answers."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        """Returns the nodes inside the tag, between marks."""
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        mark = lambda text: jinja2.nodes.Output([jinja2.nodes.TemplateData(text)])  # noqa: E731
        return [mark(OPEN), *body, mark(CLOSE)]


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which counts the rounds of loops where no template can name the count."""

    def __init__(self, chat: bool, **options: object):
        """Makes an environment.

        Args:
          chat: whether templates render conversations, with the settings of `transformers`.
        """
        extensions = [_Generation, "jinja2.ext.loopcontrols"] if chat else []
        blocks = {"trim_blocks": True, "lstrip_blocks": True} if chat else {}
        super().__init__(extensions=extensions, **blocks, **options)
        self.count = 0
        if chat:
            self.filters["tojson"] = _to_json
            self.globals["raise_exception"] = _raise

    def compiled(self, text: str, variables: dict[str, Callable]) -> jinja2.Template:
        """Returns a template with these global variables."""
        tree = self.parse(text)
        for loop in list(tree.find_all(jinja2.nodes.For)):
            # A template has no name for an attribute of its environment.
            rounds = jinja2.nodes.EnvironmentAttribute("rounds", lineno=loop.lineno)
            loop.iter = jinja2.nodes.Call(rounds, [loop.iter], [], None, None, lineno=loop.lineno)
        code = self.compile(tree)
        return jinja2.Template.from_code(self, code, self.make_globals(variables))

    def rounds(self, values: Iterable) -> Iterator:
        """Yields values, and counts them."""
        for value in values:
            self.count += 1
            if self.count > MOST_ROUNDS:
                raise jinja2.TemplateError(f"it makes more than {MOST_ROUNDS:,} rounds of loops")
            yield value


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Returns JSON as the filter `tojson` of transformers does; that of Jinja is for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message):
    raise jinja2.TemplateError(message)


def _regex_replace(text, pattern, replacement, count=0):
    return re.sub(pattern, replacement, text, count=count)


class Renderer:
    """Compiled templates."""

    def __init__(self):
        self._templates: dict[tuple, jinja2.Template] = {}

    def render(self, text: str, chat: bool, date: str, values: dict[str, object]) -> str:
        """Returns the text of a template.

        Args:
          text: the template.
          chat: whether it renders conversations; otherwise it is of an lm-eval task.
          date: ISO date of its function strftime_now; "" for no such function.
          values: its variables.
        """
        key = text, chat, date
        if key not in self._templates:
            while len(self._templates) >= _TEMPLATES:
                # The oldest one: a dict keeps its order.
                del self._templates[next(iter(self._templates))]
            self._templates[key] = _compiled(text, chat, date)
        template = self._templates[key]
        template.environment.count = 0  # type: ignore[attr-defined]
        return template.render(values)


def _compiled(text, chat, date):
    if chat:
        functions = {"strftime_now": datetime.date.fromisoformat(date).strftime} if date else {}
        return Environment(True).compiled(text, functions)
    environment = Environment(False, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters["regex_replace"] = _regex_replace
    return environment.compiled(text, {})


def as_json(content: str) -> str:
    """Returns a YAML file as JSON, with its aliases written out, and {CODE: name} for functions.

    Args:
      content: its bytes as Latin-1.

    Raises:
      Exception: it is no YAML, or has other tags of Python.
    """

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        pass

    Loader.add_constructor(CODE, lambda loader, node: {CODE: loader.construct_scalar(node)})
    loader = Loader(content.encode("latin-1"))
    try:
        return json.dumps(loader.get_single_data(), default=str)
    finally:
        loader.dispose()


def searched(operation: str, pattern: str, flags: int, *arguments: object) -> str:
    """Returns the JSON of what a method of a compiled regular expression returns.

    Args:
      operation: "compile", "findall", "split" or "sub".
      arguments: of the method.
    """
    compiled = re.compile(pattern, flags)
    return json.dumps(None if operation == "compile" else getattr(compiled, operation)(*arguments))


def _limit(kind, most, hard=None):
    """Sets a limit, but not above the one that the process has; a system may lack it."""
    with contextlib.suppress(OSError, ValueError):
        _, highest = resource.getrlimit(kind)
        most = most if highest == resource.RLIM_INFINITY else min(most, highest)
        resource.setrlimit(kind, (most, highest if hard is None else min(hard, most)))


def _answer(renderer, request):
    """Returns (whether it is an answer, its bytes)."""
    try:
        kind, *arguments = json.loads(request)
        text = {"render": renderer.render, "yaml": as_json, "regex": searched}[kind](*arguments)
        content = text.encode("utf-8", "surrogatepass")
        if len(content) <= MOST_BYTES:
            return True, content
        error = f"it makes more than {MOST_BYTES >> 20} MiB of text"
    except MemoryError:
        # What earlier requests left may fill the memory, so a new process answers the next one.
        os._exit(OUT_OF_MEMORY)
    except BaseException as failure:
        error = str(failure).strip() or type(failure).__name__
    return False, error.splitlines()[0][:300].encode("utf-8", "replace")


def main() -> None:
    """Answers requests until the standard input ends, which is when the other process does."""
    _limit(resource.RLIMIT_AS, int(sys.argv[1]), int(sys.argv[1]))
    # Neither a dump of the memory nor a file is written, whatever a template calls.
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        _limit(kind, 0, 0)
    renderer, source, target = Renderer(), sys.stdin.buffer, sys.stdout.buffer
    while len(head := source.read(HEAD.size)) == HEAD.size:
        request = source.read(HEAD.unpack(head)[1])
        # The limit counts the time of earlier requests too, so it rises with each.
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + CPU_SECONDS + 1)
        fine, content = _answer(renderer, request)
        target.write(HEAD.pack(fine, len(content)) + content)
        target.flush()


if __name__ == "__main__":
    main()
