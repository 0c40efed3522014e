"""Models that write texts with their layers in turn, or in other processes."""

import atexit
import dataclasses
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable

import jax

from sparse_dataflow.cluster import cluster
from sparse_dataflow.commands.models import load_model
from sparse_dataflow.core.messages import say
from sparse_dataflow.evaluation import kv_cache, remote_stages
from sparse_dataflow.evaluation.stages import Layers, LayersInTurn, Stage, Staged
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError

WAIT_SECONDS = 300.0
"""Seconds in which the process of a stage must listen, at first and after it was lost."""

ON_THIS_MACHINE = "127.0.0.1:0"


def _on_host(options: load_model.ModelOptions) -> Model:
    """Returns a model in host memory: all of it may have no room on the device."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return load_model.load(options)


def _prepared(model: Model, form: str, layers: range) -> kv_cache.Weights:
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return kv_cache.prepare(model.model, model.params, form, layers)


def _stage_maker(model: Model, form: str, in_turn: bool) -> Callable[[range], Stage]:
    def stage_of(layers):
        weights = _prepared(model, form, layers).layers
        if in_turn:
            return LayersInTurn(model.model, weights, layers.start)
        return Layers(model.model, jax.device_put(weights, jax.local_devices()[0]), layers.start)

    return stage_of


def _staged(model, form, stages):
    ends = jax.device_put(_prepared(model, form, range(0)), jax.local_devices()[0])
    staged = Staged(model.model, ends, stages, on_loss=lambda reason: say(f"{reason}; waiting"))
    return dataclasses.replace(model, params={}), staged


def layers_in_turn(options: load_model.ModelOptions, form: str) -> tuple[Model, Staged]:
    """Loads a model into host memory, from where its layers come to the device one after another.

    Returns:
      (the model without parameters, what decodes in place of its weights).

    Raises:
      UserError: see `load_model.load`.
    """
    model = _on_host(options)
    stage = _stage_maker(model, form, True)(range(model.model.num_layers))
    return _staged(model, form, [stage])


def over_processes(
    options: load_model.ModelOptions, form: str, stages: str
) -> tuple[Model, Staged]:
    """Loads the ends of a model, and lets other processes hold its layers.

    Args:
      stages: number of processes to start on this machine, or host:port of each that serves one,
        in the order of the layers, joined by commas.

    Returns:
      (the model without parameters, what decodes in place of its weights).

    Raises:
      UserError: a process cannot be reached, has another model, or there are more than layers.
    """
    local = int(stages) if stages.isdecimal() else 0
    addresses = [ON_THIS_MACHINE] * local or [part.strip() for part in stages.split(",")]
    for address in addresses:
        remote_stages.refuse_no_address(address, f"--stages={stages}", "a number above 0, or ")
    model = _on_host(options)
    if not 0 < len(addresses) <= model.model.num_layers:
        raise UserError(
            f"--stages={stages} is {len(addresses)} processes; legal: 1 to {model.model.num_layers}"
            ", the layers of the model."
        )
    token = secrets.token_hex(16) if local else cluster.token()
    processes = [_Process(number, options, form, token) for number in range(local)]
    facts = remote_stages.facts_of(model)
    count, layers = len(addresses), model.model.num_layers
    joined: list[Stage] = []
    for number, address in enumerate(addresses):
        joined.append(
            remote_stages.RemoteStage(
                address,
                range(layers * number // count, layers * (number + 1) // count),
                facts,
                WAIT_SECONDS,
                token,
                processes[number].restart if local else None,
            )
        )
    return _staged(model, form, joined)


def serve(options: load_model.ModelOptions, form: str, address: str, in_turn: bool) -> None:
    """Serves layers of a model to other processes that write, until it is stopped.

    Raises:
      UserError: see `load_model.load` and `remote_stages.serve`.
    """
    remote_stages.refuse_no_address(address, f"--stage_at={address}")
    model = _on_host(options)
    facts = remote_stages.facts_of(model)
    stage_of = _stage_maker(model, form, in_turn)
    remote_stages.serve(address, facts, model.model, stage_of, cluster.token())


class _Process:
    """A process of this machine that serves a stage; it is started at once, and again by
    `restart`."""

    def __init__(self, number: int, options: load_model.ModelOptions, form: str, token: str):
        named = dataclasses.asdict(options)
        names = [field.name for field in dataclasses.fields(load_model.ModelOptions)]
        self._command = [
            *(sys.executable, "-m", "sparse_dataflow", "generate"),
            *(f"--{name}={named[name]}" for name in names),
            *(f"--form={form}", f"--stage_at={ON_THIS_MACHINE}"),
        ]
        self._number, self._token = number, token
        self._start()
        self._was_used = False
        atexit.register(lambda: self._process.kill())

    def restart(self) -> str:
        """Returns the address of a process that has served no one yet.

        Raises:
          UserError: it ended before it listened.
        """
        if self._was_used:
            self._process.kill()  # It may live without its connection.
            self._process.wait()
            self._start()
        self._was_used = True
        if not self._listens.wait(WAIT_SECONDS) or not self._address:
            raise UserError(
                f"The process of stage {self._number} did not listen; its lines above say why."
            )
        return self._address

    def _start(self):
        self._address, self._listens = "", threading.Event()
        self._process = subprocess.Popen(
            self._command,
            env=os.environ | {"SPARSE_DATAFLOW_TOKEN": self._token},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C ends a text, not the stages.
            text=True,
            errors="replace",
        )
        threading.Thread(
            target=self._read, args=(self._process, self._listens), daemon=True
        ).start()

    def _read(self, process, listens):
        for line in process.stderr:
            if line.startswith(remote_stages.LISTENING):
                self._address = line.removeprefix(remote_stages.LISTENING).strip()
                listens.set()
            else:
                say(f"[stage {self._number}] {line.rstrip()}")
        listens.set()
