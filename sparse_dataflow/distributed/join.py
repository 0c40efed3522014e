"""Joins the processes of a run into one jax runtime, and ends all of them when one fails."""

import contextlib
import hashlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping

import jax

from sparse_dataflow.distributed import rendezvous
from sparse_dataflow.distributed.cluster import Membership
from sparse_dataflow.distributed.watch import LOST_AFTER
from sparse_dataflow.files.errors import UserError


@contextlib.contextmanager
def joined(
    me: Membership, facts: Mapping[str, object], timeout: float, heartbeat: float
) -> Iterator[rendezvous.Group | None]:
    """Inside, jax has the devices of all processes; yields them, None for a process alone.

    If the block fails in one process, all end, each saying why; the process of the failure itself
    ends here, as the runtime would wait for the others at its end.

    Args:
      me: this process.
      facts: what all must have been told alike, JSON-able; compared by name and by hash.
      timeout: seconds to wait for the last process.
      heartbeat: that `watch.Watch` goes by, seconds; jax's runtime, which ends all without naming
        anyone, waits longer.

    Raises:
      UserError: on every process, where they do not meet; see `rendezvous.meet`.
    """
    if me.processes == 1:
        yield None
        return
    text = json.dumps(facts, sort_keys=True, default=str)
    facts = {**facts, "hash of all flags": hashlib.sha256(text.encode()).hexdigest()[:12]}
    group = rendezvous.meet(me.coordinator, me.processes, me.process, facts, timeout)
    try:
        # jax would look for a launcher itself, and take one GPU a SLURM task, however few tasks.
        jax.distributed.initialize(
            me.coordinator,
            me.processes,
            me.process,
            local_device_ids=me.devices,
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=100 + round(2 * LOST_AFTER * heartbeat),
        )
        yield group
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
                group.blame(rendezvous.GRACE_SECONDS)
        group.fail(words)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    jax.distributed.shutdown()
