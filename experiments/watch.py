"""Shows runs while they train, in a browser on this machine.

    python -m experiments.watch --run=runs/NAME
    python -m experiments.watch --run=runs/ONE,runs/OTHER     side by side, with what differs

Loss, throughput, goodput, layouts as they change and alerts are read from the run folders and
refreshed every few seconds. The page is served on 127.0.0.1 alone; from another machine use
`ssh -L 8642:127.0.0.1:8642 HOST`. Nothing is written. Ctrl-C ends it.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import between, positive, setting


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags."""

    run: str = setting("", "Run folder to show, or a comma list of them.", path=True)
    port: int = setting(8642, "Port on 127.0.0.1; 0 is any free one.", legal=between(0, 65535))
    refresh: float = setting(5.0, "Seconds between two readings.", legal=positive(3600))


def main(options):
    """Serves until it is interrupted; see the module docstring."""
    from sparse_dataflow.commands import watch

    watch.serve(options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, options=Options)
