"""Command lines from dataclasses: flags, a help page, and errors that name the nearest legal name.

An experiment ends with one of

    command_line.run_main(main, __doc__, options=Options)          main(options)
    command_line.run_main(main, __doc__, shared=SHARED)            main(request)
    command_line.run_main(main, __doc__, shared=SHARED, options=Options)   main(request, options)

`Options` is a frozen dataclass whose fields are settings, each of which becomes a flag. `shared`
names flags of `request.NAMED`; every other setting of a `RunConfig` is then reached by
--set path=value.  absl parses the flags; help and errors are made here, as absl's own help lists
the flags of every imported library.
"""

import dataclasses
import os
import select
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NoReturn

from absl import flags as absl_flags

from sparse_dataflow.cluster import signals
from sparse_dataflow.commands import peer_flags, request, run_list
from sparse_dataflow.commands.experiment_modules import experiment as experiment
from sparse_dataflow.commands.experiment_modules import program, with_commands
from sparse_dataflow.commands.request import Request
from sparse_dataflow.core.config import settings
from sparse_dataflow.core.config.settings import Setting
from sparse_dataflow.files import console, json_files, output, storage
from sparse_dataflow.files.console import SCRIPT
from sparse_dataflow.files.errors import (
    TEMPORARY,
    Mistakes,
    UserError,
    in_words,
    is_exhausted,
    lines,
)
from sparse_dataflow.files.output import best_effort_errors, flush_or_exit
from sparse_dataflow.hardware import detect
from sparse_dataflow.runs.run_config import RunConfig

WIDTH = 100
_HELP = ("help", "helpshort", "helpfull", "h", "?")
_HELP_COLUMN = 27
_SET = "set"
_FLAGFILE_BYTES = 2**20
_MOST_FLAGFILES = 100
_LONGEST_FLAG = 100


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
      setting: its help, type and legal values; `setting.name` is the flag's name.
      path: the path in a `RunConfig` that it sets; "" for a flag of the experiment's own.
      default: as the help page shows it.
    """

    setting: Setting
    path: str = ""
    default: str = ""

    @property
    def name(self) -> str:
        """The flag's name, without dashes."""
        return self.setting.name


_QUIET = Flag(
    Setting("quiet", bool, False, "Print results, warnings and errors alone."), default="no"
)


def flags_of(
    shared: Sequence[str],
    options: type | None,
    defaults: Mapping[str, object] = request.NO_DEFAULTS,
) -> list[Flag]:
    """The flags of an experiment: the shared ones in the order of `request.NAMED`, then its own.

    Args:
      options: dataclass of the experiment's own flags, or None.
      defaults: shared flag -> its default in this experiment, where it has another.
    """
    paths = settings.by_path(RunConfig)
    flags = []
    for name, (path, help_text) in request.NAMED.items():
        if name in shared:
            s = request.START[name] if not path else paths[path]
            s = dataclasses.replace(s, name=name, help=help_text or s.help)
            default = request.shown_default(name, s)
            if name in defaults:
                default = settings.text(defaults[name])
            flags.append(Flag(s, path, default))
    for s in settings.settings(options) if options else ():
        flags.append(Flag(s, "", settings.text(s.default)))
    return [*flags, _QUIET]


class _Parser(absl_flags.ArgumentParser):
    """Text -> value of one flag; a ValueError's text completes "--name=text "."""

    def __init__(self, flag: Flag):
        self.flag = flag

    def parse(self, argument):
        if self.flag.path == request.EVOLUTION:
            return argument  # Its options are parsed with the other settings.
        return self.flag.setting.parse(argument)


def parse(
    argv: Sequence[str], flags: Sequence[Flag], sets: bool, mistakes: Mistakes
) -> tuple[dict[str, object], list[str]]:
    """Reads a command line as far as it is legal.

    Args:
      argv: program name, then arguments.
      flags: the legal flags.
      sets: whether --set is legal.
      mistakes: gets an error for each unknown flag, illegal or missing value, flag that is given
        twice and positional argument.

    Returns:
      (flag -> value, of the flags that are given; the texts of every --set).

    Raises:
      UserError: a --flagfile cannot be read.
    """
    values = absl_flags.FlagValues()
    for flag in flags:
        values[flag.name] = absl_flags.Flag(
            _Parser(flag),
            absl_flags.ArgumentSerializer(),
            flag.name,
            None,
            flag.setting.help,
            boolean=flag.setting.is_switch,
        )
    if sets:
        absl_flags.DEFINE_multi_string(_SET, [], "path=value", flag_values=values)
    folders = {f.name for f in flags if f.name in ("resume", "run") and not f.setting.is_switch}
    with_value = {f.name for f in flags if not f.setting.is_switch} | {_SET} & set(values)
    for words in _flag_words(
        _with_newest(_with_flagfiles(argv), folders)[1:], with_value, set(values)
    ):
        with mistakes.collected():
            _parse_flag(words, values, flags, sets)
    flag_values = {f.name: values[f.name].value for f in flags if values[f.name].present}
    for name in flag_values:
        with mistakes.collected():
            if values[name].present > 1:
                raise UserError(f"--{name} is given twice; give it once.")
    return flag_values, list(values[_SET].value or ()) if sets else []


def _flag_words(argv: Sequence[str], with_value: Collection[str], names: Collection[str]):
    """Yields the words of one flag, or of one argument that is none; a word after an unknown flag
    is its value."""
    waiting = list(reversed(argv))
    while waiting:
        word = waiting.pop()
        if word == "--":
            yield from (["--", rest] for rest in reversed(waiting))
            return
        words, name = [word], word.lstrip("-")
        if word.startswith("-") and "=" not in word and waiting:
            follows = not waiting[-1].startswith("-") and not _is_flag(name, names)
            if name in with_value or (name and follows):
                words.append(waiting.pop())
        yield words


def _is_flag(name, names):
    return name in names or name.removeprefix("no") in names


def _parse_flag(words: Sequence[str], values, flags: Sequence[Flag], sets: bool) -> None:
    """Reads one of `_flag_words` into the values; raises UserError if it is not legal."""
    name, equals, _ = words[0].lstrip("-").partition("=")
    if not words[0].startswith("-") or not name:
        name, equals, _ = words[-1].partition("=")
        near = settings.did_you_mean(name, [f.name for f in flags], "--") if equals else ""
        raise UserError(
            f"unexpected argument {settings.shown(words[-1])!r}; flags are written --name=value"
            + (f", {near}" if near else ".")
        )
    if len(name) > _LONGEST_FLAG or not _is_flag(name, values):
        raise UserError(_unknown(name, flags, sets))  # absl's own hint recurses by letters.
    try:
        values(["", *words])
    except absl_flags.UnrecognizedFlagError as error:
        raise UserError(_unknown(error.flagname.split("=")[0], flags, sets)) from None
    except absl_flags.IllegalFlagValueError as error:
        assignment, _, reason = str(error).removeprefix("flag ").partition(": ")
        name, equals, text = assignment.partition("=")
        raise UserError(f"{name}{equals}{settings.shown(text)} {reason}") from None
    except (absl_flags.Error, ValueError) as error:
        reason = str(error)
        raise UserError(f"{reason[:1].lower()}{reason[1:]}; write --name=value.") from None


def _with_flagfiles(argv: Sequence[str]) -> list[str]:
    """The command line with the lines of each --flagfile in its place, which may name others."""
    words: list[str] = []
    # A stack, so that the lines of a file stand where it was named, also inside of another file.
    files, size, waiting = 0, 0, list(reversed(argv))
    while waiting:
        argument = waiting.pop()
        name, _, path = argument.lstrip("-").partition("=")
        if argument == "--":
            return [*words, argument, *reversed(waiting)]
        if name != "flagfile" or not argument.startswith("-"):
            words.append(argument)
            continue
        try:
            files += 1
            if files > _MOST_FLAGFILES:
                raise ValueError(f"more than {_MOST_FLAGFILES} files, or one that names itself")
            content = json_files.read_bytes(settings.expanded(path), _FLAGFILE_BYTES - size)
            size += len(content)
            lines = [line.strip() for line in content.decode().splitlines()]
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"--flagfile={settings.shown(path)} cannot be read: {reason}."
            ) from None
        waiting += [line for line in reversed(lines) if line and not line.startswith("#")]
    return words


def _with_newest(argv: Sequence[str], names: Collection[str]) -> list[str]:
    """Returns the command line with the newest run as the value of a flag of `names` alone."""
    words = list(argv)
    for i, word in enumerate(words):
        if word == "--":
            break
        name = word.lstrip("-")
        alone = i + 1 == len(words) or words[i + 1].startswith("-")
        if word.startswith("-") and name in names and alone:
            words[i] = f"--{name}={run_list.NEWEST}"
    return words


def _unknown(name: str, flags: Sequence[Flag], sets: bool) -> str:
    name = settings.shown(name)
    if other := peer_flags.hint(name, [f.name for f in flags], sets):
        return f"unknown flag --{name}; {other}"
    if sets and (path := request.path_of_old_flag(name)):
        return f"unknown flag --{name}; write --set {path}=VALUE."
    near = settings.did_you_mean(name, [f.name for f in flags], "--")
    return f"unknown flag --{name}; {near or '--help lists the flags.'}"


def help_text(doc: str, program: str, flags: Sequence[Flag], sets: bool, all: bool = False) -> str:
    """The help page: the experiment's docstring, then each flag with its default; with `all` every
    setting that --set takes as well."""
    doc = with_commands(doc.strip())
    paragraphs = [f"usage: {program} [--flag=value ...]", doc]
    lines = [_help_lines(f"  --{f.name}={f.default}", f.setting) for f in flags]
    paragraphs.append("\n".join(["Flags, with their defaults:", *lines]))
    if sets:
        paragraphs.append(
            "Every other setting: --set path=value (repeat it for several), as in\n"
            "  --set training.warmup=0.05 --set model.remat=full\n"
            + ("Settings, with their defaults:" if all else "--help=all lists them.")
        )
    if sets and all:
        by_flag = {path: name for name, (path, _) in request.NAMED.items() if path}
        lines = []
        for path, s in settings.by_path(RunConfig).items():
            default = request.shown_default(path, s)
            flag = f" (flag: --{by_flag[path]})" if path in by_flag else ""
            lines.append(_help_lines(f"  {path}={default}{flag}", s))
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs) + "\n"


def _help_lines(left: str, s: Setting) -> str:
    text = s.help
    # An integer's limits are plain from its meaning.
    if s.legal and s.type in (float, tuple[float, ...]):
        text += f" Legal: {s.legal[0]}."
    if s.choices:
        several = s.type == tuple[str, ...]
        names = ("all", "none", *s.choices) if several else s.choices
        text += f" Legal: {', '.join(names)}{', or a comma list' if several else ''}."
    lines = textwrap.wrap(text, WIDTH - _HELP_COLUMN, break_on_hyphens=False) or [""]
    if len(left) < _HELP_COLUMN:
        lines[0] = left.ljust(_HELP_COLUMN) + lines[0]
    else:
        lines.insert(0, left)
    return f"\n{' ' * _HELP_COLUMN}".join(lines)


def run_main(
    main: Callable[..., int | None],
    doc: str,
    *,
    shared: Sequence[str] = (),
    options: type | None = None,
    defaults: Mapping[str, object] = request.NO_DEFAULTS,
    argv: Sequence[str] | None = None,
) -> None:
    """An experiment's entry point: parse, check, call main, exit.

    Args:
      main: called as the module docstring says; its result is the exit status, None for 0.
      doc: the experiment's docstring, the first part of its help page.
      shared: names of the shared flags; with one, --set is legal too.
      options: dataclass of the experiment's own flags.
      defaults: shared flag -> its default in this experiment, where it has another.
      argv: program name, then arguments; `sys.argv` where None.

    Raises:
      SystemExit: always. Status 2 after "error: ..." for a UserError, 130 after Ctrl-C, 75 after
        SIGTERM or SIGHUP.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(detect.POOL_SHARE))
    with best_effort_errors(), signals.ended_by_signals():
        _run(main, doc, shared, options, defaults, sys.argv if argv is None else argv)


def _run(main, doc, shared, options, defaults, argv) -> None:
    flags = flags_of(shared, options, defaults)
    try:
        storage.allow_open_files()
        if page := _help_kind(argv):
            show(help_text(doc, program(), flags, bool(shared), all=page == "all"))
        if argv[1:] == ["--version"]:
            show(version())
        detect.check_xla_flags()
        status = main(*arguments(argv, shared, options, defaults))
        sys.stdout.flush()
    except UserError as error:
        for line in lines(error):
            print(f"error: {line}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_left():
            sys.exit(0)
        if not (words := in_words(error)):
            raise
        print(f"error: {words}", file=sys.stderr, flush=True)
        if is_exhausted(error):
            os._exit(2)  # The end of Python waits for threads that cannot go on.
        sys.exit(2)
    except signals.Ended as ended:
        print(f"stopped: {ended}", file=sys.stderr)
        flush_or_exit(TEMPORARY)
        raise
    sys.exit(status or 0)


def show(text: str) -> NoReturn:
    """Prints a page and exits with status 0, also where nobody reads to its end."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_left():
            raise
    sys.exit(0)


def version() -> str:
    """The line of --version."""
    return f"{SCRIPT} {console.version()}\n"


def _reader_left() -> bool:
    """Returns whether nobody reads the standard output any more, as after `| head`; then drops
    what is still to be written there."""
    try:
        descriptor = sys.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        if not any(event & select.POLLERR for _, event in poll.poll(0)):
            return False
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    except (AttributeError, OSError, ValueError):
        return False
    return True


def arguments(
    argv: Sequence[str],
    shared: Sequence[str],
    options: type | None,
    defaults: Mapping[str, object] = request.NO_DEFAULTS,
) -> list[object]:
    """What `run_main` passes to main.

    Raises:
      UserError: the command line is not legal.
    """
    flags = flags_of(shared, options)
    mistakes = Mistakes()
    flag_values, sets = parse(argv, flags, bool(shared), mistakes)
    if flag_values.pop(_QUIET.name, False):
        output.be_quiet()
    for name in ("resume", "run"):
        if flag_values.get(name) == run_list.NEWEST:
            flag_values[name] = run_list.newest(f"--{name}")
            output.LOGGER.info("--%s=%s, the newest run", name, flag_values[name])
    arguments: list[object] = []
    if shared:
        arguments.append(_request(flags, flag_values, sets, mistakes).with_defaults(defaults))
    mistakes.refuse()
    if options is not None:
        option_names = {s.name for s in settings.settings(options)}
        arguments.append(options(**{n: v for n, v in flag_values.items() if n in option_names}))
    return arguments


def _request(
    flags: Sequence[Flag],
    flag_values: Mapping[str, object],
    sets: Sequence[str],
    mistakes: Mistakes,
) -> Request:
    start = {n: v for n, v in flag_values.items() if n in request.START}
    changes = {f.path: flag_values[f.name] for f in flags if f.path and f.name in flag_values}
    spelled = {f.path: f"--{f.name}" for f in flags if f.path in changes}
    return request.checked(start, changes, spelled, sets, mistakes)


def _help_kind(argv: Sequence[str]) -> str:
    """ "all", "short", or "" where no help was asked for."""
    for argument in argv[1:]:
        if argument == "--":
            break
        name, _, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name in _HELP:
            return "all" if value == "all" or name == "helpfull" else "short"
    return ""
