"""Runs an experiment's command line in this process."""

import pytest

from sparse_dataflow.commands import command_line


def exit_status(experiment, *arguments):
    """Returns the exit status of an experiment, a module, with command-line arguments."""
    with pytest.raises(SystemExit) as left:
        command_line.run_main(
            experiment.main,
            experiment.__doc__,
            shared=getattr(experiment, "SHARED", ()),
            options=getattr(experiment, "Options", None),
            defaults=getattr(experiment, "DEFAULTS", {}),
            argv=["program", *map(str, arguments)],
        )
    return left.value.code
