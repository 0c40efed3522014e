"""Stages in other processes: how they are asked, and how a process serves one.

The process of a stage listens, and whoever writes texts connects: both prove that they know
SPARSE_DATAFLOW_TOKEN and name the model (`cluster.handshake`).  Then each message is an object with
arrays (`cluster.lines`): {"first", "count"} names the layers, {"cache_tokens"} with x and lengths
begins texts, {} with x and positions appends a token.  The answer is {} with the outputs.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.cluster import handshake, lines, rendezvous
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.messages import say, say_result
from sparse_dataflow.core.model import stacks
from sparse_dataflow.evaluation.stages import Stage, StageLost
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError, escaped, first_line

LISTENING = "the stage listens at "
"""Words before the address that a process says once it listens."""

_LOST = (OSError, ValueError)
"""What `Lines` raises where the other side has gone or sends nonsense."""


def facts_of(model: Model) -> dict[str, str]:
    """Returns what processes compare before they work together: the model, and its numbers."""
    digest = hashlib.blake2b()
    for leaf in jax.tree.leaves(stacks.map_arrays(np.asarray, model.params)):
        digest.update(np.ascontiguousarray(leaf).view(np.uint8))
    return {
        "model": str(dataclasses.asdict(model.model)),
        "weights": digest.hexdigest(),
    }


class RemoteStage:
    """A stage of another process."""

    def __init__(
        self,
        address: str,
        layers: range,
        facts: dict[str, str],
        seconds: float,
        token: str,
        restart: Callable[[], str] | None = None,
    ):
        """Connects.

        Args:
          address: host:port where the process listens.
          layers: the consecutive layers that it shall hold.
          facts: see `facts_of`.
          seconds: to wait for the process, at first and after it was lost.
          token: secret that both share; "" for none.
          restart: starts the process again, and returns its address; None where others do.

        Raises:
          UserError: it cannot be reached, or has another token or model.
        """
        self._address, self._layers, self._facts = address, layers, facts
        self._seconds, self._token, self._restart = seconds, token, restart
        self._connection: lines.Lines | None = None
        self.revive()

    def read_prompts(
        self, x_BxTxD: jax.Array, lengths_B: jax.Array, cache_tokens: int
    ) -> jax.Array:
        """See `Stage`."""
        return self._ask({"cache_tokens": cache_tokens}, x_BxTxD, lengths_B)

    def append(self, x_Bx1xD: jax.Array, positions_Bx1: jax.Array) -> jax.Array:
        """See `Stage`."""
        return self._ask({}, x_Bx1xD, positions_Bx1)

    def revive(self) -> None:
        """See `Stage`."""
        if self._connection is not None:
            return
        if self._restart is not None:
            self._address = self._restart()
        self._connection = handshake.join(
            lines.host_and_port(self._address),
            {"process": 1, "processes": 2, "facts": self._facts},
            self._seconds,
            self._token,
            role="stage at",
            where="--stages names where `generate --stage_at` listens",
        )
        self._connection.keep_alive()
        try:
            self._ask({"first": self._layers.start, "count": len(self._layers)})
        except StageLost as error:
            raise UserError(str(error)) from None

    def _ask(self, message, *arrays):
        if self._connection is None:
            raise StageLost(f"the stage at {self._address} is not there")
        try:
            self._connection.send_arrays(message, [np.asarray(array) for array in arrays])
            answer, answers = self._connection.receive_arrays()
        except _LOST as error:
            self._connection.close()
            self._connection = None
            raise StageLost(
                f"the stage at {self._address} was lost ({first_line(error)})"
            ) from None
        if failed := answer.get("failed"):
            raise UserError(f"The stage at {self._address} failed: {escaped(str(failed))}")
        return jnp.asarray(answers[0]) if answers else None


def refuse_no_address(address: str, flag: str, legal: str = "") -> None:
    """Raises UserError where an address of a flag is not host:port; `legal`: what else is."""
    try:
        lines.host_and_port(address)
    except ValueError:
        raise UserError(f"{flag[:80]} has {address[:80]!r}; legal: {legal}host:port.") from None


def serve(
    address: str,
    facts: dict[str, str],
    config: ModelConfig,
    stage_of: Callable[[range], Stage],
    token: str,
) -> None:
    """Serves a stage, to one writer after another; port 0 is a free one, and serves one alone.

    Args:
      address: host:port to listen at.
      facts: see `facts_of`.
      stage_of: makes the stage of consecutive layers.
      token: secret that both sides share; "" for none.

    Raises:
      UserError: the process cannot listen there, or anybody could join.
    """
    host, port = lines.host_and_port(address)
    try:
        listener = lines.listen(host, port, 16)
    except OSError as error:
        raise UserError(f"{address} cannot be listened at: {error.strerror}.") from None
    with listener:
        interface, bound = lines.interface(listener), listener.getsockname()[1]
        if not token:
            rendezvous.warn_of_open_port(host, bound, interface)
        say_result(f"{LISTENING}{host}:{bound}")
        mine = {"process": 0, "processes": 2, "facts": facts}
        while True:
            try:
                connection = handshake.accept_all(listener, mine, math.inf, token)[1]
            except UserError as error:
                say(f"refused: {error}")
                continue
            connection.keep_alive()
            try:
                _answer(connection, config, stage_of)
            except _LOST as error:
                reason = first_line(error)
            connection.close()
            if not port:
                return
            say(f"the writer has left ({reason})")


def _answer(connection, config, stage_of):
    """Answers the messages of a writer until it leaves."""
    stage: Stage | None = None
    while True:
        message, arrays = connection.receive_arrays()
        try:
            if {"first", "count"} <= message.keys():
                layers = range(message["first"], message["first"] + message["count"])
                if not (layers and 0 <= layers.start and layers.stop <= config.num_layers):
                    raise ValueError(f"{layers} are not layers of this model")
                stage, outputs = stage_of(layers), []
            elif stage is None:
                raise ValueError("the writer named no layers")
            elif "cache_tokens" in message:
                x_BxTxD, lengths_B = map(jnp.asarray, arrays)
                outputs = [stage.read_prompts(x_BxTxD, lengths_B, message["cache_tokens"])]
            else:
                x_Bx1xD, positions_Bx1 = map(jnp.asarray, arrays)
                outputs = [stage.append(x_Bx1xD, positions_Bx1)]
            answers = [np.asarray(output) for output in outputs]
        except Exception as error:  # Such as of memory: the writer tells its user.
            connection.send_arrays({"failed": first_line(error)}, [])
            raise ValueError(first_line(error)) from error
        connection.send_arrays({}, answers)
