"""Information and warnings of the package on standard error.

The logger "sparse_dataflow" has the level INFO, and prints unless the program configured logging
itself. `logging.getLogger("sparse_dataflow").setLevel("WARNING")` leaves the warnings alone, as
--quiet does.
"""

import logging
import sys

LOGGER = logging.getLogger("sparse_dataflow")


class _Printer(logging.Handler):
    """Prints records above a progress bar, unless the root logger has handlers, which get them.

    Some libraries give it the handler of `logging.basicConfig()` by accident; that one is left out.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one record; an error of the stream is ignored."""
        chosen = [h for h in logging.getLogger().handlers if not _is_default(h)]
        LOGGER.propagate = bool(chosen)  # Is read after this handler.
        if chosen or sys.stderr is None:
            return
        try:
            warning = "warning: " if record.levelno >= logging.WARNING else ""
            text = f"{warning}{record.getMessage()}"
            bars = sys.modules.get("tqdm")
            if bars is not None:
                bars.tqdm.write(text, file=sys.stderr)
            else:
                print(text, file=sys.stderr)
            sys.stderr.flush()
        except (OSError, RuntimeError, ValueError):
            return


def _is_default(handler):
    """Returns whether a handler is that of `logging.basicConfig()` without a format."""
    pattern = getattr(handler.formatter, "_fmt", None)
    return type(handler) is logging.StreamHandler and pattern == logging.BASIC_FORMAT


def install() -> None:
    """Makes the package print; a level that the program has set stays."""
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
    if not any(isinstance(handler, _Printer) for handler in LOGGER.handlers):
        LOGGER.addHandler(_Printer())


def is_quiet() -> bool:
    """Returns whether information is not wanted."""
    return LOGGER.level > logging.INFO


def be_quiet() -> None:
    """Leaves warnings, errors and results alone."""
    LOGGER.setLevel(logging.WARNING)
