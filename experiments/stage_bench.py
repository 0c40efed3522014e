"""Tokens a second of a model whose layers are not all on one device, paired in one run.

Times greedy texts of one prompt by turns: whole on one device, with the layers in host memory, in
processes of this machine, and, where there are several devices, cut over them.  The rows of one
device and of processes multiply by kernels of a CPU where there is one; cut weights do not.

    python -m experiments.stage_bench --run=RUN
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m experiments.stage_bench --run=RUN
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.commands.models.load_model import ModelOptions
from sparse_dataflow.core.config.settings import AT_LEAST_ONE, setting

from .benchmarks.options import BenchOptions


@dataclasses.dataclass(frozen=True)
class Options(BenchOptions, ModelOptions):
    """What is timed."""

    stages: int = setting(2, "Processes that hold the layers.", legal=AT_LEAST_ONE)
    tokens: int = setting(32, "Tokens written in a timed round.", legal=AT_LEAST_ONE)


def main(options):
    """Measures, prints and writes; see the module docstring."""
    import jax
    import numpy as np

    from sparse_dataflow.commands import measurement
    from sparse_dataflow.commands.models import load_model, staged
    from sparse_dataflow.evaluation import generate, kv_cache
    from sparse_dataflow.evaluation.sampling_settings import AUTO
    from sparse_dataflow.hardware import detect

    from .benchmarks import paired

    model = load_model.load(options)
    places: dict[str, kv_cache.Weights | generate.Decoder] = {
        "one device": kv_cache.prepare(model.model, model.params),
        "layers in turn": staged.layers_in_turn(options, AUTO)[1],
        f"{options.stages} processes": staged.over_processes(options, AUTO, str(options.stages))[1],
    }
    if (count := jax.device_count()) > 1:
        cut = load_model.load(options, f"tensor:{count}")
        places[f"tensor:{count}"] = kv_cache.prepare(model.model, cut.params)
    prompt, texts = [[model.tokenizer.start_id]], {}

    def writer(name):
        def write():
            tokens = generate.generate_tokens(
                model.model, places[name], prompt, options.tokens, model.context
            )
            texts[name] = [token for [token] in tokens]

        return write

    seconds = paired.paired_seconds({name: writer(name) for name in places}, options.rounds)
    rows = []
    for name, times in seconds.items():
        ratio = paired.paired_ratio(seconds["one device"], times, "speed")
        same = texts[name] == texts["one device"]
        row = {
            "place": name,
            "tokens_per_second": options.tokens / float(np.median(times)),
            "same_text": same,
        }
        rows.append(row | ratio)
        print(
            f"{name:>14}: {row['tokens_per_second']:7.1f} tokens/s, {ratio['speed']:.2f} of one "
            f"device's, {'the same text' if same else 'another text'}",
            flush=True,
        )
    facts = {
        "inputs": "the token that begins a text; the likeliest tokens follow",
        "run": str(model.folder.name),
        "layers": model.model.num_layers,
        "width": model.model.d_model,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "devices": count,
        "chip": detect.cpu_name(),
    }
    name = f"stage_bench_{facts['chip']}_{count}_devices"
    measurement.keep(options.keep, name, facts["chip"], [facts | {"rows": rows}])


if __name__ == "__main__":
    command_line.run_main(main, __doc__, options=Options)
