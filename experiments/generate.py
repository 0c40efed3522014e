"""Continues prompts with a trained model.

    python -m experiments.generate --run=runs/NAME --prompt="def main("
    python -m experiments.generate --run=runs/NAME --prompt="def " --temperature=0.8 --samples=4
    python -m experiments.generate --run=runs/NAME --interactive --temperature=0.8 --top_p=0.95
    python -m experiments.generate --run=runs/NAME --prompts=FILE --batch=16
    python -m experiments.generate --run=runs/NAME --variant=dense --activation_sparsity=0.4
    python -m experiments.generate --run=runs/MIXTURE --expert_slots=4
    python -m experiments.generate --run=DIR --mesh=tensor:4
    python -m experiments.generate --run=DIR --layers_in_turn
    python -m experiments.generate --run=DIR --stages=2
    python -m experiments.generate --run=DIR --stage_at=HOST:7100
    python -m experiments.generate --run=DIR --stages=HOST:7100,OTHER:7100

Without --variant the sparse model writes, where the run has one.  --interactive continues each line
of the input; Ctrl-C stops the text being written, Ctrl-D, or Ctrl-C at the prompt, ends it.
--prompts continues each line of a file; a line of a .jsonl file is a string or {"prompt": string}.
It prints a line {"prompt", "sample", "text", "stopped_by"} for each text.

--activation_sparsity lets the smallest inputs of each projection count as zeros (TEAL).  One number
is the share of all, and qkv:0.5,mlp_out:0.3 is one for each.  Thresholds come from about 1,000
training tokens of the run.  One text on a CPU then reads fewer bytes of dense weights; block-sparse
weights, several texts, GPUs and TPUs gain nothing.

--mesh cuts the weights and the cache over the devices of this host, for a model that is larger than
one of them.  The texts are the same, to the rounding of sums over devices.

--layers_in_turn leaves the layers in host memory, and the device holds two at a time.

--stages lets other processes hold the layers, the first ones the first layers: processes of this
machine, or such as --stage_at started on others, with the same model and SPARSE_DATAFLOW_TOKEN.
Where one is lost, the writer waits until it is back, computes the caches again from the tokens so
far, and goes on with the same text.

--expert_slots leaves the experts of a mixture in host memory, and fetches those that the router
picks.  The device holds that number of experts of each layer.  The texts are the same.  Afterwards
it prints the bytes on the device, the bytes fetched for a token, and the share of fetches that came
ahead.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.commands.models.load_model import ActivationOptions, ModelOptions
from sparse_dataflow.core.config.settings import AT_LEAST_ONE, AT_LEAST_ZERO, setting
from sparse_dataflow.evaluation.sampling_settings import AUTO, DENSE, FORMS, SEEDS, SamplingSettings
from sparse_dataflow.files.errors import UserError

PLACES = ("mesh", "expert_slots", "layers_in_turn", "stages", "stage_at")
"""Flags that place weights elsewhere than whole on one device."""


@dataclasses.dataclass(frozen=True)
class Options(SamplingSettings, ActivationOptions, ModelOptions):
    """The flags."""

    expert_slots: int = setting(
        0,
        "Experts of each layer on the device; the others are fetched from host memory. 0 is all.",
        legal=AT_LEAST_ZERO,
    )
    form: str = setting(
        AUTO,
        "How weights are decoded on a CPU: rows reads the stored ones of blocks and of masks of "
        "rows (1x16) alone, int8 rounds, dense multiplies by XLA; auto is the fastest that does "
        "not round.",
        choices=FORMS,
    )
    layers_in_turn: bool = setting(
        False,
        "Leaves the layers in host memory; the device holds the one that computes and the next.",
    )
    stages: str = setting(
        "",
        "Other processes hold the layers: a number of them to start here, or host:port of each "
        "that was started with --stage_at, joined by commas.",
    )
    stage_at: str = setting(
        "", "Serves layers to a process with --stages, at host:port; writes no text itself."
    )
    mesh: str = setting(
        "", "Cuts the weights over devices, as in tensor:2; legal axes: feature, tensor."
    )
    prompt: str = setting("", "Text to continue; empty begins a document.")
    prompts: str = setting("", "File of prompts, one a line, or .jsonl.", path=True)
    interactive: bool = setting(False, "Continue each line of the input.")
    samples: int = setting(1, "Continuations of each prompt.", legal=AT_LEAST_ONE)
    batch: int = setting(8, "Texts of --prompts that are written at once.", legal=AT_LEAST_ONE)
    max_new_tokens: int = setting(64, "Most tokens to write.", legal=AT_LEAST_ONE)
    stop: str = setting("", "Text that ends the continuation; \\n is a line break.")
    chat: bool = setting(False, "Prompts are messages, which the chat template renders.")
    seed: int = setting(0, "Seed of the first text; each further one adds 1.", legal=SEEDS)


def _refuse_pairs(options):
    """Refuses flags that place weights in two ways, or that what is placed cannot do."""
    texts = ("prompt", "prompts", "interactive")
    share, form = bool(options.share), options.form not in (AUTO, DENSE)
    given = {f"--{name}": bool(getattr(options, name)) for name in (*PLACES, *texts)}
    given |= {"--activation_sparsity": share, f"--form={options.form}": form}
    for flag, others in {
        "--mesh": ("--expert_slots", "--layers_in_turn", "--stages", "--activation_sparsity"),
        "--expert_slots": ("--layers_in_turn", "--stages", "--activation_sparsity"),
        "--stages": ("--layers_in_turn", "--activation_sparsity"),
        "--layers_in_turn": ("--activation_sparsity",),
        "--stage_at": (
            *("--mesh", "--expert_slots", "--stages", "--activation_sparsity"),
            *(f"--{name}" for name in texts),
        ),
        f"--form={options.form}": ("--mesh", "--expert_slots"),
    }.items():
        named = [other for other in others if given[flag] and given[other]]
        if named:
            raise UserError(f"{flag} does not go with {', '.join(named)}; leave one out.")


def main(options):
    """Writes to the output as the text comes; see the module docstring."""
    from sparse_dataflow.commands.models import generate, load_model, staged
    from sparse_dataflow.evaluation import decoded_form

    share = options.share
    if sum(map(bool, (options.prompt, options.prompts, options.interactive))) > 1:
        raise UserError("Give one of --prompt, --prompts and --interactive.")
    if options.samples > 1 and not options.temperature:
        raise UserError(
            f"--samples={options.samples} would be equal texts; give --temperature above 0."
        )
    _refuse_pairs(options)
    if options.stage_at:
        staged.serve(options, options.form, options.stage_at, options.layers_in_turn)
        return
    prompts = generate.read_prompts(options.prompts) if options.prompts else []
    offloaded = None
    if options.form != DENSE and not options.mesh and not options.expert_slots:
        decoded_form.start_compiling()
    if options.expert_slots:
        model, offloaded = generate.offload_experts(options, options.expert_slots)
        writer = generate.Writer(model, offloaded)
    elif options.stages:
        writer = generate.Writer(*staged.over_processes(options, options.form, options.stages))
    elif options.layers_in_turn:
        writer = generate.Writer(*staged.layers_in_turn(options, options.form))
    else:
        model = load_model.load(options, options.mesh)
        if share:
            model = generate.with_thresholds(model, share)
        writer = generate.Writer(model, form=options.form)
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "samples", "seed", "chat")
    sampling = {name: getattr(options, name) for name in names}
    sampling["stop"] = [options.stop.replace("\\n", "\n")] if options.stop else []
    if options.interactive:
        generate.converse(writer, **sampling)
    elif options.prompts:
        generate.write_file(writer, prompts, options.batch, **sampling)
    else:
        generate.write(writer, options.prompt, **sampling)
    if offloaded:
        generate.say_traffic(offloaded)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, options=Options)
