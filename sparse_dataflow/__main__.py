"""The console script: `sparse-dataflow COMMAND --flag=value`, or `python -m sparse_dataflow`."""

import runpy
import sys

from sparse_dataflow.commands import command_line as commands
from sparse_dataflow.commands import experiment_modules
from sparse_dataflow.files import console, extras
from sparse_dataflow.files.errors import UserError


def main() -> None:
    """Runs the command that the first argument names; without one, lists them.

    Raises:
      SystemExit: always.
    """
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        commands.show(commands.version())
    if not arguments or arguments[0] in ("-h", "--help", "-help", "help"):
        commands.show(_page())
    try:
        experiment = _experiment(arguments[0])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.argv = sys.argv[:1] + arguments[1:]
    try:
        runpy.run_module(
            f"{experiment_modules.PACKAGE}.{experiment}", run_name="__main__", alter_sys=True
        )
    except ModuleNotFoundError as error:
        if not (text := extras.missing(error, "This command")):
            raise
        print(f"error: {text}", file=sys.stderr)
        sys.exit(2)


def _experiment(word):
    sentences = experiment_modules.experiments()
    experiment = console.EVERYDAY.get(word, word.replace("-", "_"))
    if experiment not in sentences:
        from sparse_dataflow.core.config import settings

        names = [*console.EVERYDAY, *sentences]
        near = settings.did_you_mean(settings.shown(word), names, "")
        legal = ", ".join(console.EVERYDAY)
        raise UserError(
            f"unknown command {settings.shown(word)!r}; {near or f'legal: {legal}.'} "
            f"{console.SCRIPT} alone lists all."
        )
    return experiment


def _page():
    sentences = experiment_modules.experiments()
    lines = [f"usage: {console.SCRIPT} COMMAND [--flag=value ...]", ""]
    lines += [f"  {name:<12}  {sentences[module]}" for name, module in console.EVERYDAY.items()]
    others = sorted(set(sentences) - set(console.EVERYDAY.values()))
    lines += ["", "Benchmarks and studies:", ""]
    lines += [f"  {name:<18}  {sentences[name]}" for name in others]
    lines += ["", f"{console.SCRIPT} COMMAND --help lists its flags."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
