"""Joins the processes of a run into one jax runtime, and ends all of them when one fails."""

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping

import jax

from sparse_dataflow.errors import UserError
from sparse_dataflow.execution import rendezvous

ENVIRONMENT = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "processes": "JAX_NUM_PROCESSES",
    "process": "JAX_PROCESS_ID",
}
"""Variables that stand for a field of Membership that no flag gives."""


@dataclasses.dataclass(frozen=True)
class Membership:
    """Which process of which run this is.

    Attributes:
      coordinator: host:port of process 0.
      processes: how many there are.
      process: this one's number, from 0.
    """

    coordinator: str = ""
    processes: int = 1
    process: int = 0


def membership(
    coordinator: str, processes: int, process: int, environment: Mapping[str, str] = os.environ
) -> Membership:
    """From flags, where they are given, else from the environment, else alone.

    Args:
      coordinator: empty where not given.
      processes: 0 where not given.
      process: -1 where not given.
      environment: see ENVIRONMENT.

    Raises:
      UserError: what is given does not name a process; says what is missing.
    """
    given = {"coordinator": coordinator, "processes": processes, "process": process}
    unset = {"coordinator": "", "processes": 0, "process": -1}
    found = {}
    for name, value in given.items():
        if value == unset[name] and environment.get(ENVIRONMENT[name]):
            text = environment[ENVIRONMENT[name]]
            if name != "coordinator" and not text.isdecimal():
                raise UserError(f"{ENVIRONMENT[name]}={text} is not a whole number.")
            value = text if name == "coordinator" else int(text)
        found[name] = value
    if found["processes"] in (0, 1) and not found["coordinator"]:
        return Membership()
    missing = [f"--{name}" for name, value in found.items() if value == unset[name]]
    if missing:
        raise UserError(
            f"a run of several processes needs {', '.join(missing)} too (or "
            f"{', '.join(ENVIRONMENT[name[2:]] for name in missing)})."
        )
    return Membership(**found)


@contextlib.contextmanager
def joined(me: Membership, facts: Mapping[str, object], timeout: float) -> Iterator[None]:
    """Inside, jax has the devices of all processes.

    If the block fails in one process, all end, each saying why; the process of the failure itself
    ends here, as the runtime would wait for the others at its end.

    Args:
      me: this process.
      facts: what all must have been told alike, JSON-able; compared by name and by hash.
      timeout: seconds to wait for the last process.

    Raises:
      UserError: on every process, where they do not meet; see `rendezvous.meet`.
    """
    if me.processes == 1:
        yield
        return
    text = json.dumps(facts, sort_keys=True, default=str)
    facts = {**facts, "hash of all flags": hashlib.sha256(text.encode()).hexdigest()[:12]}
    group = rendezvous.meet(me.coordinator, me.processes, me.process, facts, timeout)
    try:
        jax.distributed.initialize(me.coordinator, me.processes, me.process)
        yield
        group.leave()
    except BaseException as error:
        if isinstance(error, UserError):
            words, status = str(error), 2
            print(f"error: {words}", file=sys.stderr, flush=True)
        else:
            words, status = f"{type(error).__name__}: {error}", 1
            if isinstance(error, KeyboardInterrupt):
                words, status = "it was interrupted.", 130
            else:
                traceback.print_exc()
        group.fail(words)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    jax.distributed.shutdown()
