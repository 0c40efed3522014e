"""The command line of lm-eval with the model "sparse_dataflow".

python -m sparse_dataflow.commands.lm_eval --model sparse_dataflow --model_args run=DIR --tasks piqa
"""

import os
import socket
import sys
import threading
import traceback
import urllib.parse
import urllib.request

from sparse_dataflow.evaluation import refuse_without_lm_eval
from sparse_dataflow.files.errors import UserError, first_line

HUB = "https://huggingface.co"
SECONDS = 5.0
"""Seconds after which a hub that did not answer counts as out of reach."""


def is_offline() -> bool:
    """Returns whether the hub cannot be reached from here; a proxy is taken to reach it."""
    if urllib.request.getproxies():
        return False
    hub = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT") or HUB)
    answers: list[bool] = []

    def connect():
        try:
            port = hub.port or (80 if hub.scheme == "http" else 443)
            socket.create_connection((hub.hostname, port), SECONDS).close()
            answers.append(True)
        except (OSError, ValueError):
            pass

    # Looking up a name cannot be interrupted.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return not answers


def main() -> None:
    """Runs lm-eval on the arguments of this process.

    Raises:
      UserError: an error of lm-eval or of a library that it uses, such as that of a network.
    """
    refuse_without_lm_eval()
    offline = is_offline()
    if offline:  # The libraries retry for a minute otherwise. They read these when imported.
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    from lm_eval.__main__ import cli_evaluate

    from sparse_dataflow.commands import lm_eval_model  # noqa: F401 (registers the model)

    try:
        cli_evaluate()
    except (UserError, MemoryError):
        raise
    except Exception as error:  # A hub, a task file or an argument can raise anything.
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__", "")).startswith("sparse_dataflow."):
            raise
        network = " The hub cannot be reached, and its cache was used." if offline else ""
        raise UserError(f"lm-eval ends: {first_line(error).rstrip('.')}.{network}") from error


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
