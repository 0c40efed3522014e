"""The flags that the experiments share.

An experiment ends with

    if __name__ == "__main__":
        flags.run(main, __doc__)

where `main(values)` reads `values.density` and the like.
"""

import dataclasses
from collections.abc import Callable, Sequence

from absl import flags as absl_flags
from sparse_dataflow.config.model import DTYPES

from experiments import command_line, contradictions
from experiments.command_line import ABOVE_ZERO, AT_LEAST_ONE, AT_LEAST_ZERO, Flag, Group
from experiments.contradictions import given
from experiments.device_flags import DEVICES
from experiments.execution_flags import RELAY
from experiments.model_flags import EVOLUTION, MODEL, SPARSITY

__all__ = [
    "DATA",
    "DEVICES",
    "EVOLUTION",
    "GROUPS",
    "MODEL",
    "RELAY",
    "RUN",
    "SPARSITY",
    "START",
    "TRAINING",
]
__all__ += ["as_dict", "check", "define", "given", "run", "without"]

_MODULE = __name__


TRAINING = Group(
    "Training",
    "how long, and how",
    (
        Flag(
            "minutes",
            "number",
            2.0,
            "Training time of each model, in minutes; compiling and evaluating are not counted.",
            legal=ABOVE_ZERO,
        ),
        Flag(
            "steps",
            "integer",
            0,
            "Optimizer steps of each model; 0 is as many as --minutes allows.",
            legal=AT_LEAST_ZERO,
        ),
        Flag(
            "batch",
            "integer",
            0,
            "Sequences in an optimizer step; 0 is the scale's own number.",
            legal=AT_LEAST_ZERO,
        ),
        Flag(
            "accumulation",
            "integer",
            1,
            "Micro-batches that an optimizer step is cut into, to save memory.",
            legal=AT_LEAST_ONE,
        ),
        Flag(
            "learning_rate",
            "number",
            0.0,
            "Peak of the warm-up and cosine schedule, of dense weights; 0 is the scale's own.",
            legal=AT_LEAST_ZERO,
        ),
        Flag(
            "sparse_rate",
            "number",
            0.0,
            "How many times that a weight of 1/8 density learns at, with its low-rank term, others "
            "by a power of their density; 0 is the scale's own.",
            legal=AT_LEAST_ZERO,
        ),
        Flag(
            "vector_rate",
            "number",
            0.0,
            "How many times that embeddings, biases and norms learn at; 0 is the scale's own.",
            legal=AT_LEAST_ZERO,
        ),
        Flag(
            "warmup",
            "number",
            0.1,
            "Fraction of the training spent warming up.",
            legal=("in [0, 1)", lambda w: 0 <= w < 1),
        ),
        Flag(
            "final_rate",
            "number",
            0.1,
            "Learning rate that the cosine ends at, as a fraction of the peak.",
            legal=("in [0, 1]", lambda r: 0 <= r <= 1),
        ),
        Flag(
            "weight_decay",
            "number",
            0.1,
            "Decoupled decay of AdamW, on matrices.",
            legal=AT_LEAST_ZERO,
        ),
        Flag(
            "state_dtype",
            "choice",
            "float32",
            "Type of Adam's moments, and of the gradients of a micro-batch; bfloat16 takes 10 "
            "bytes a parameter where float32 takes 16.",
            DTYPES,
        ),
        Flag(
            "skip_spikes",
            "number",
            0.0,
            "Standard deviations above the mean of the last 128 losses beyond which a step is "
            "skipped; after 4 in a row the parameters go back to a checkpoint from before, and the "
            "batches go on. 6 is usual; 0 is never.",
            legal=AT_LEAST_ZERO,
        ),
        Flag(
            "seed", "integer", 0, "Draws the weights, data order and patterns.", legal=AT_LEAST_ZERO
        ),
        Flag(
            "twin",
            "switch",
            "auto",
            "Train the dense twin as well, for the same time; auto does so at laptop scales.",
            ("auto", "yes", "no"),
        ),
    ),
)
DATA = Group(
    "Data",
    "what is learned",
    (
        Flag(
            "corpus",
            "text",
            "python_stdlib",
            "python_stdlib, sotu, a folder or file (.txt, .jsonl), or a tfds name such as c4/en.",
        ),
        Flag(
            "tokenizer",
            "choice",
            "bpe",
            "bpe is trained on the corpus; gpt2 is GPT-2's own.",
            ("bpe", "gpt2"),
        ),
        Flag(
            "vocab_size",
            "integer",
            0,
            "Tokens that bpe learns, at least 257; 0 is the scale's own number.",
            legal=("0, or at least 257", lambda v: v == 0 or v > 256),
        ),
    ),
)
START = Group(
    "Start",
    "what the weights are before the first step",
    (
        Flag(
            "init_from",
            "text",
            "",
            "Run folder, or Hugging Face directory of GPT-2 or OPT, whose weights, shape and "
            "tokenizer are taken; sparse weights keep their largest blocks. Empty draws weights.",
        ),
    ),
)
RUN = Group(
    "Run",
    "where the results go",
    (
        Flag("out", "text", "", "Run folder to make; empty is runs/EXPERIMENT-DATE.", fixed=False),
        Flag("resume", "text", "", "Run folder to go on with, under its own flags.", fixed=False),
        Flag(
            "eval_every",
            "integer",
            0,
            "Steps between evaluations on held-out documents; 0 is eight a run.",
            legal=AT_LEAST_ZERO,
            fixed=False,
        ),
        Flag(
            "checkpoint_every",
            "integer",
            0,
            "Steps between checkpoints; 0 is at every other evaluation.",
            legal=AT_LEAST_ZERO,
            fixed=False,
        ),
    ),
)
GROUPS = (MODEL, SPARSITY, EVOLUTION, TRAINING, DATA, START, RUN, DEVICES, RELAY)
# The executor is kept: with the relay's files, what a run goes on from lies with it.
_NOT_KEPT = ("out", "resume", *(f.name for f in DEVICES.flags if f.name != "executor"))


def without(*names: str, groups: Sequence[Group] = GROUPS) -> tuple[Group, ...]:
    """The groups less the named flags, for an experiment that has no use for them."""
    kept = [
        Group(g.title, g.help, tuple(f for f in g.flags if f.name not in names)) for g in groups
    ]
    return tuple(group for group in kept if group.flags)


def with_defaults(groups: Sequence[Group], **defaults: str | int | float) -> tuple[Group, ...]:
    """The groups with other defaults of the named flags."""
    change = lambda f: dataclasses.replace(f, default=defaults.get(f.name, f.default))  # noqa: E731
    return tuple(dataclasses.replace(g, flags=tuple(map(change, g.flags))) for g in groups)


def define(
    groups: Sequence[Group] = GROUPS, values: absl_flags.FlagValues = absl_flags.FLAGS
) -> None:
    """Registers the flags on `values`; calling it again changes nothing."""
    command_line.define(groups, values, _MODULE)


def run(
    main: Callable[[absl_flags.FlagValues], int | None],
    doc: str,
    groups: Sequence[Group] = GROUPS,
    argv: Sequence[str] | None = None,
    values: absl_flags.FlagValues = absl_flags.FLAGS,
) -> None:
    """An experiment's entry point: parse, check, `main(values)`, exit.

    Args:
      main: called with the checked values; its result is the exit status, None for 0.
      doc: the experiment's docstring, the first part of its help page.
      groups: the experiment's flags.
      argv: program name, then arguments; `sys.argv` where None.
      values: where the flags live.

    Raises:
      SystemExit: always. Status 2 after "error: ..." for a UserError, 130 after Ctrl-C.
    """
    define(groups, values)

    def prepare(parsed):
        contradictions.check(parsed, groups)
        contradictions.adopt(parsed)
        command_line.check_ranges(groups, parsed)

    command_line.run(main, doc, groups, prepare, values, argv)


def as_dict(values: absl_flags.FlagValues, groups: Sequence[Group] = GROUPS) -> dict:
    """Every flag but those of the devices, --out and --resume, as JSON.

    Belongs under "flags" in a run's config.json.

    Where main replaces an "auto" by what it chose (`values.scale = "nano"`), the choice is kept,
    and a run resumed on another machine stays what it was.
    """
    names = [f.name for g in groups for f in g.flags if f.name not in _NOT_KEPT]
    return {name: contradictions.plain(values[name].value) for name in names}


def check(values: absl_flags.FlagValues, groups: Sequence[Group] = GROUPS) -> None:
    """Refuses values out of range and flags that contradict each other or the resumed run.

    Raises:
      UserError: naming the flags and what would be legal.
    """
    contradictions.check(values, groups)
