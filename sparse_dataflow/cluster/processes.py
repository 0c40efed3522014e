"""The processes of a run join one jax runtime; when one fails, all end."""

import contextlib
import hashlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping

import jax

from sparse_dataflow.cluster import cluster, rendezvous
from sparse_dataflow.cluster.cluster import Membership
from sparse_dataflow.cluster.signals import ENDING, Ended
from sparse_dataflow.cluster.watch import LOST_AFTER
from sparse_dataflow.core.collectives import any_process
from sparse_dataflow.files.errors import TEMPORARY, UserError, in_words
from sparse_dataflow.files.output import flush_or_exit


def stopped_status(number: int) -> int:
    """Returns the exit status of a run that saved and ended; the same on all processes.

    TEMPORARY asks the scheduler for another start.  Whoever presses Ctrl-C is there to resume: 0.

    Args:
      number: signal that this process received; 0 for none.
    """
    return TEMPORARY if any_process(number in ENDING) else 0


@contextlib.contextmanager
def joined(
    me: Membership, facts: Mapping[str, object], timeout: float, heartbeat: float
) -> Iterator[rendezvous.ProcessSet | None]:
    """Gives jax the devices of all processes for a block; yields None for a single process.

    If the block fails on one process, all processes end and print the reason. The failed process
    exits here, because jax's runtime would wait for the others.

    Args:
      me: this process.
      facts: JSON-able settings that must be equal on all processes.
      timeout: seconds to wait for the last process.
      heartbeat: heartbeat of `watch.Watch` in seconds. jax's runtime, which ends all processes
        without a name, waits longer.

    Raises:
      UserError: on every process, if they do not meet; see `rendezvous.meet`.
    """
    if me.processes == 1:
        yield None
        return
    text = json.dumps(facts, sort_keys=True, default=str)
    # The hash covers flags too long to be compared one by one, and shows in the message that they
    # differ.
    facts = {**facts, "hash of all flags": hashlib.sha256(text.encode()).hexdigest()[:12]}
    token = cluster.token()
    group = rendezvous.meet(me.coordinator, me.processes, me.process, facts, timeout, token)
    # jax would listen on every interface; a name of this machine's own address is reached there
    # alone.
    bind = None
    if group.interface:
        host = f"[{group.interface}]" if ":" in group.interface else group.interface
        bind = f"{host}:{me.coordinator.rpartition(':')[2]}"
    # Its handler of SIGTERM would replace ours.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        # jax's own detection would take one GPU per SLURM task, however few tasks there are.
        jax.distributed.initialize(
            me.coordinator,
            me.processes,
            me.process,
            local_device_ids=me.devices,
            coordinator_bind_address=bind,
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=100 + round(2 * LOST_AFTER * heartbeat),
        )
        yield group
        group.leave()
    except BaseException as error:
        words = in_words(error) if isinstance(error, Exception) else ""
        if isinstance(error, UserError) or words:
            message, status = words or str(error), 2
            print(f"error: {message}", file=sys.stderr, flush=True)
        elif isinstance(error, KeyboardInterrupt):
            message, status = "it was interrupted.", 130
        elif isinstance(error, Ended):
            message, status = str(error), TEMPORARY
            print(f"stopped: {error}", file=sys.stderr)
        else:
            message, status = f"{type(error).__name__}: {error}", 1
            # The end of another process is the reason on all, and not what follows from it here.
            group.wait_for_cause(rendezvous.GRACE_SECONDS)
            traceback.print_exc()
        group.fail(message, TEMPORARY if status == TEMPORARY else 2)
        sys.stderr.flush()
        flush_or_exit(status)
        os._exit(status)
    jax.distributed.shutdown()
