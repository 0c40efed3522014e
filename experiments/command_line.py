"""A command line that reads well: grouped help, and mistakes answered with the nearest legal name.

Values live in absl flags; the help page, the error texts and the exit codes are made here, because
absl's own help lists every flag of every imported library.
"""

import dataclasses
import difflib
import math
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence

from absl import flags as absl_flags

from sparse_dataflow.files.errors import UserError

WIDTH = 100
_HELP = ("help", "helpshort", "helpfull", "h", "?")
_HELP_COLUMN = 29
_SWITCH = {"true": "yes", "1": "yes", "false": "no", "0": "no"}
Legal = tuple[str, Callable[[float], bool]]
AT_LEAST_ZERO: Legal = ("0 or more", lambda n: n >= 0)
AT_LEAST_ONE: Legal = ("1 or more", lambda n: n >= 1)
AT_LEAST_TWO: Legal = ("2 or more", lambda n: n >= 2)
ABOVE_ZERO: Legal = ("above 0", lambda n: n > 0)
A_FRACTION: Legal = ("in (0, 1]", lambda n: 0 < n <= 1)


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag: `--name=value`.

    Attributes:
      name: as typed, without dashes.
      kind: "integer", "number" (finite), "text", "choice" (one of `names`), "list" (comma
        separated `names`, "all" or "none"; its value is a tuple in their order), or "switch"
        (a choice, of yes and no where `choices` says no other, that may also be written `--name`
        and `--noname`).
      default: in the flag's own type; "all" or "none" for a list.
      help: one or two sentences, with units.
      choices: the legal names of a choice or list, or what says them: that is called late, so
        that a registry may fill itself first.
      legal: (words, test) of a legal integer or number, such as `AT_LEAST_ONE`.
      fixed: whether a resumed run must keep the value that it was started with.
    """

    name: str
    kind: str
    default: str | int | float
    help: str
    choices: Sequence[str] | Callable[[], Sequence[str]] = ()
    legal: Legal | None = None
    fixed: bool = True

    @property
    def names(self) -> Sequence[str]:
        """The legal names; none of a flag that is no choice."""
        names = self.choices() if callable(self.choices) else self.choices
        return names or (("yes", "no") if self.kind == "switch" else ())


@dataclasses.dataclass(frozen=True)
class Group:
    """Flags under one heading of the help page."""

    title: str
    help: str
    flags: tuple[Flag, ...]


class _Parser(absl_flags.ArgumentParser):
    """Text -> value of one flag; a ValueError's text completes "--name=text "."""

    syntactic_help = ""

    def __init__(self, flag: Flag):
        self.flag = flag

    def parse(self, text):
        flag = self.flag
        # The default is legal as it stands; looking it up would import registries too early.
        if text == flag.default and flag.kind != "list":
            return text
        if flag.kind == "integer":
            return _integer(text)
        if flag.kind == "number":
            return _number(text)
        if flag.kind == "choice":
            return _choice(text, flag.names)
        if flag.kind == "switch":
            return _choice(_SWITCH.get(text.lower(), text), flag.names)
        if flag.kind == "list":
            return _names(text, flag.names)
        return text

    def flag_type(self):
        return self.flag.kind


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("is not a whole number.") from None


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("is not a number.") from None
    if not math.isfinite(value):
        raise ValueError("is not a finite number.")
    return value


def _choice(text: str, legal: Sequence[str]) -> str:
    by_lower = {name.lower(): name for name in legal}
    if text.lower() in by_lower:
        return by_lower[text.lower()]
    hint = did_you_mean(text, legal)
    raise ValueError(f"is unknown{hint and '; ' + hint}{'' if hint else '.'} {_legal(legal)}.")


def _names(text: str, legal: Sequence[str]) -> tuple[str, ...]:
    if text.lower() in ("", "none"):
        return ()
    if text.lower() == "all":
        return tuple(legal)
    named = {_choice(part.strip(), (*legal, "all", "none")) for part in text.split(",")}
    if named & {"all", "none"}:
        raise ValueError("mixes all or none with names; give one or the other.")
    return tuple(name for name in legal if name in named)


def _legal(names: Sequence[str]) -> str:
    return f"Legal: {', '.join(names)}"


def did_you_mean(text: str, legal: Iterable[str], prefix: str = "") -> str:
    """ "did you mean NAME?" with the nearest legal name, or "" where none is near."""
    by_lower = {name.lower(): name for name in legal}
    near = difflib.get_close_matches(text.lower(), by_lower, n=1, cutoff=0.55)
    return f"did you mean {prefix}{by_lower[near[0]]}?" if near else ""


def define(groups: Sequence[Group], values: absl_flags.FlagValues, module: str) -> None:
    """Registers every flag on `values` under `module`; a flag that is there already stays."""
    mine = {flag.name for flag in values.flags_by_module_dict().get(module, ())}
    for flag in _flags(groups):
        if flag.name not in mine:
            absl_flag = absl_flags.Flag(
                _Parser(flag),
                absl_flags.ArgumentSerializer(),
                flag.name,
                flag.default,
                flag.help,
                boolean=flag.kind == "switch",
            )
            absl_flags.DEFINE_flag(absl_flag, values, module)


def parse(argv: Sequence[str], groups: Sequence[Group], values: absl_flags.FlagValues) -> None:
    """Reads the command line into `values`.

    Args:
      argv: program name, then arguments.
      groups: the flags that suggestions are drawn from.
      values: where `define` has put them.

    Raises:
      UserError: for an unknown flag, an illegal value, a missing value or a positional argument.
    """
    names = [flag.name for flag in _flags(groups)]
    try:
        rest = values(list(argv))[1:]
    except absl_flags.UnrecognizedFlagError as error:
        name = error.flagname.split("=")[0]
        hint = did_you_mean(name, names, "--") or "--help lists the flags."
        raise UserError(f"unknown flag --{name}; {hint}") from None
    except absl_flags.IllegalFlagValueError as error:
        flag, _, reason = str(error).removeprefix("flag ").partition(": ")
        raise UserError(f"{flag} {reason}") from None
    except (absl_flags.Error, ValueError) as error:
        raise UserError(f"{str(error)[:1].lower()}{str(error)[1:]}; write --name=value.") from None
    if rest:
        name, equals, _ = rest[0].partition("=")
        hint = did_you_mean(name, names, "--") if equals else ""
        raise UserError(
            f"unexpected argument {rest[0]!r}; flags are written --name=value"
            + (f", {hint}" if hint else ".")
        )


def check_ranges(groups: Sequence[Group], values: absl_flags.FlagValues) -> None:
    """Refuses integers and numbers outside their legal range, with a UserError naming it."""
    for flag in _flags(groups):
        if flag.legal and flag.name in values:
            words, test = flag.legal
            value = values[flag.name].value
            if value is None or not test(value):
                raise UserError(f"--{flag.name}={value} is not legal: it must be {words}.")


def help_text(doc: str, program: str, groups: Sequence[Group]) -> str:
    """The help page: what the experiment is, then each group with its flags and their defaults."""
    parts = [
        f"usage: {program} [--flag=value ...]",
        doc.strip(),
        "Each flag is shown with its default.",
    ]
    for group in groups:
        parts.append("\n".join([f"{group.title}: {group.help}", *map(_flag_help, group.flags)]))
    return "\n\n".join(parts) + "\n"


def _flag_help(flag: Flag) -> str:
    left = f"  --{flag.name}={flag.default}"
    text = flag.help
    if flag.legal and flag.kind == "number":  # an integer's limits are plain from its meaning
        text += f" Legal: {flag.legal[0]}."
    if flag.names:
        extra = ", or a comma list" if flag.kind == "list" else ""
        named = ("all", "none", *flag.names) if flag.kind == "list" else flag.names
        text += f" {_legal(named)}{extra}."
    lines = textwrap.wrap(text, WIDTH - _HELP_COLUMN, break_on_hyphens=False)
    if len(left) < _HELP_COLUMN:
        lines[0] = left.ljust(_HELP_COLUMN) + lines[0]
    else:
        lines.insert(0, left)
    return f"\n{' ' * _HELP_COLUMN}".join(lines)


def run(
    main: Callable[[absl_flags.FlagValues], int | None],
    doc: str,
    groups: Sequence[Group],
    prepare: Callable[[absl_flags.FlagValues], None],
    values: absl_flags.FlagValues,
    argv: Sequence[str] | None = None,
) -> None:
    """Parses the command line, prepares the values, calls main and leaves the process.

    Args:
      main: called with the parsed values; its result is the exit status, None for 0.
      doc: the first part of the help page.
      groups: the flags, defined on `values` already.
      prepare: checks values against each other, and may fill in some.
      values: where the flags live.
      argv: program name, then arguments; `sys.argv` where None.

    Raises:
      SystemExit: always. Status 2 after "error: ..." for a UserError, 130 after Ctrl-C.
    """
    argv = sys.argv if argv is None else argv
    asked = _help_asked(argv)
    try:
        if asked:
            page = help_text(doc, program(), groups)
            sys.stdout.write(page + (_library_help(groups, values) if asked == "full" else ""))
            sys.exit(0)
        parse(argv, groups, values)
        prepare(values)
        status = main(values)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(status or 0)


def program() -> str:
    """How this process was started: "python -m experiments.NAME", or the script's path."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return f"python -m {spec.name}" if spec else f"python {sys.argv[0]}"


def _help_asked(argv: Sequence[str]) -> str:
    """ "full", "short", or "" where no help was asked for."""
    for argument in argv[1:]:
        if argument == "--":
            break
        if argument.startswith("-") and argument.lstrip("-") in _HELP:
            return "full" if argument.lstrip("-") == "helpfull" else "short"
    return ""


def _library_help(groups: Sequence[Group], values: absl_flags.FlagValues) -> str:
    """absl's own page for the flags that imported libraries define."""
    ours = {flag.name for flag in _flags(groups)}
    parts = []
    for module, found in sorted(values.flags_by_module_dict().items()):
        if not any(flag.name in ours for flag in found):
            parts.append(f"\nFlags of {module}:\n{values.module_help(module)}\n")
    return "".join(parts)


def _flags(groups: Sequence[Group]) -> list[Flag]:
    return [flag for group in groups for flag in group.flags]
