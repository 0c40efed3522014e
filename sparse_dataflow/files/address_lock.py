"""A lock on an address: one running process owns it, on whatever machine.

The owner is named by a small object, created only where there is none, and counts up in it. Stores
have no locks that end with a process: an owner on this machine is looked up, and one elsewhere is
dead when its count stands still.
"""

import contextlib
import json
import logging
import threading

from sparse_dataflow.files import folders, json_files
from sparse_dataflow.files.addresses import Address
from sparse_dataflow.files.errors import UserError

NAME = folders.NAME


class AddressLock:
    """The lock of this process on an address, until `release`."""

    def __init__(self, address: Address, flag: str):
        """Acquires the lock, which also shows that the address can be written.

        Args:
          address: what is locked.
          flag: that named it, for errors.

        Raises:
          UserError: another process owns the address, or it cannot be written.
        """
        self._address, self._object = address, address / NAME
        self._owner = folders.this_process()
        self._lost = False
        try:
            # Each attempt takes the lock, refuses, or removes what was in the way; so the loop
            # ends.
            while not self._acquired():
                pass
        except OSError as error:
            raise UserError(
                f"{flag}={address} cannot be written: {error.strerror or error}. Check its name, "
                "the credentials in the environment and the network."
            ) from error
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._count_up, name="address lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises UserError if another process took the address over.

        A store that cannot be reached says nothing: copies to it are attempted again.
        """
        if self._lost:
            raise UserError(f"{self._address} was taken over by another process, so this one ends.")

    def release(self) -> None:
        """Releases the lock and removes its object; does nothing the second time."""
        if self._released.is_set():
            return
        self._released.set()
        # At most ten seconds: a store that hangs must not keep the process from ending.
        self._thread.join(10)
        with contextlib.suppress(OSError):
            # By now the lock may be another's, which this process must not remove.
            if self._read().get("id") == self._owner["id"]:
                self._object.delete()

    def _acquired(self) -> bool:
        """Attempts to take the lock; refuses a living owner and removes a dead one's object."""
        if owner := self._read():  # Read first: some stores replace what `create` must not.
            # Containers share a machine and not its process ids; each has a host name of its own.
            if all(owner.get(name) == self._owner[name] for name in ("machine", "host")):
                if folders.is_alive(owner):
                    raise folders.in_use(self._address, owner)
            else:
                folders.await_another_machine(self._address, owner, self._read)
            # Read again, because a living owner counts up, or another process may have taken the
            # lock.
            if self._read() == owner:
                self._object.delete()
        try:
            self._object.create(self._text())
        except FileExistsError:
            if not self._read():  # What is no lock of ours is in the way.
                self._object.delete()
            return False
        # Some stores cannot create exclusively: of two writers, the one whose text stays is the
        # owner.
        return self._read().get("id") == self._owner["id"]

    def _count_up(self) -> None:
        while not self._released.wait(folders.BEAT_SECONDS):
            self._owner["count"] += 1
            try:
                if (owner := self._read()) and owner.get("id") != self._owner["id"]:
                    self._lost = True
                    return
                self._object.write(self._text())
            # A missed count does no harm: only several in a row make an owner dead.
            except OSError as error:
                logging.getLogger(__name__).info("%s", error)

    def _text(self) -> bytes:
        return json.dumps(self._owner).encode()

    def _read(self) -> json_files.JsonObject:
        """Returns the owner that the object names; {} if there is none."""
        try:
            owner = json_files.parse(self._object.read())
        except (FileNotFoundError, ValueError):
            return {}
        return owner if isinstance(owner, dict) else {}
