"""What the relay's experiments share: their flags, and the model, training and chip of them."""

import types

from experiments import execution_flags, flags
from experiments.command_line import AT_LEAST_ONE, Flag, Group

MEASURE = Group(
    "Measurement",
    "how it is measured",
    (
        Flag("steps", "integer", 3, "Timed steps.", legal=AT_LEAST_ONE),
        Flag("keep", "text", "experiments/results", "Folder for the JSON; empty keeps none."),
    ),
)
CLIPPING = Group(
    execution_flags.RELAY.title,
    "how it clips",
    tuple(flag for flag in execution_flags.RELAY.flags if flag.name == "clipping"),
)
COMMON = (
    *flags.without(
        *("minutes", "steps", "twin", "warmup", "final_rate"),
        groups=(flags.MODEL, flags.SPARSITY, flags.TRAINING),
    ),
    CLIPPING,
    MEASURE,
)


def described(values):
    """(model, training, chip) of the flags; the model is dense where --density is 1.

    On a CPU `auto` is the scale "pico", so that the command runs there.
    """
    import jax

    from experiments import recipes
    from sparse_dataflow.hardware import detect as hardware
    from sparse_dataflow.hardware.host_memory import keep_freed_memory

    keep_freed_memory()
    asked = {f.name: values[f.name].value for g in COMMON for f in g.flags}
    unasked = {"twin": "no", "warmup": 0.0, "final_rate": 0.1, "tokenizer": "bpe", "vocab_size": 0}
    settings = types.SimpleNamespace(**asked | unasked)
    if settings.scale == "auto":
        settings.scale = "pico" if jax.default_backend() == "cpu" else "1.3b"
        settings.block = min(settings.block, 16) if settings.scale == "pico" else settings.block
    chip = hardware.detect(["float32" if values.dtype == "auto" else values.dtype])
    sparse = settings.density < 1
    names = recipes.settle(settings, jax.default_backend(), chip.memory_bytes, sparse)
    variant = recipes.variants(settings, names[:1])[0]
    return variant.model, variant.training, chip
