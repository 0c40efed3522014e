"""What `--describe` and `--chips` print instead of training."""

import jax

from sparse_dataflow.commands import devices
from sparse_dataflow.commands.planning import machine_report
from sparse_dataflow.commands.preflight import settling
from sparse_dataflow.commands.request import Request
from sparse_dataflow.core import collectives
from sparse_dataflow.core.executors import mesh_axes
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import machines
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.hardware.machines import Machine
from sparse_dataflow.runs.run_config import RunConfig


def for_machines(request: Request, sparse: bool) -> None:
    """Prints the plan of a run on the machines of `request.chips`; with several, a table of them.

    Args:
      request: the command line.
      sparse: whether the model is block-sparse.

    Raises:
      UserError: no such machine, or no plan fits the only one.
    """
    chosen = machines.parse_all(request.chips)

    def config_of(machine: Machine) -> RunConfig:
        backend = "tpu" if machine.chip.name.startswith("tpu") else "gpu"
        return request.config(backend, machine.chip.memory_bytes, sparse)

    if len(chosen) > 1:
        if request.describe:
            raise UserError(
                f"--describe with --chips={request.chips}, which names {len(chosen)} machines; "
                "legal: one machine, or --chips alone, which compares them."
            )
        print(machine_report.comparison(config_of, chosen))
        return
    [machine] = chosen
    result = machine_report.plan(config_of(machine), machine)
    if request.describe:
        devices.describe(result.settled.config, machine.count)
        print()
    print(machine_report.text(result))


def for_this_machine(config: RunConfig, chip: Chip) -> None:
    """Prints every array of a run, and its plan on this machine or why there is none.

    A mesh of other devices than those here is printed without a plan.

    Raises:
      UserError: the executor cannot train the models.
    """
    sizes = mesh_axes.parse_mesh(config.parallel.mesh, None)
    count = 1
    for size in sizes.values():
        count *= max(size, 1)
    if config.parallel.mesh != mesh_axes.AUTO_MESH and count != jax.device_count():
        devices.describe(config)
        return
    try:
        result = machine_report.plan(config, settling.this_machine(chip))
    except UserError as error:
        devices.describe(config)
        if collectives.is_first():
            print(f"\nno plan for this machine: {error}")
        return
    devices.describe(result.settled.config)
    if collectives.is_first():
        print(f"\n{machine_report.text(result)}")
