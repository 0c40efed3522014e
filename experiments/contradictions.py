"""Which flags contradict each other, and which contradict the run that is resumed."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from absl import flags as absl_flags
from sparse_dataflow.config.model import PROJECTIONS

from experiments import command_line, execution_flags
from experiments.command_line import Group
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError

GPT2_VOCABULARY = 50257  # 256 bytes, 50,000 merges and the end of a text


def given(values: absl_flags.FlagValues, name: str) -> bool:
    """Whether the command line names this flag."""
    return name in values and values[name].present > 0


def check(values: absl_flags.FlagValues, groups: Sequence[Group]) -> None:
    """Refuses values out of range and flags that contradict each other or the resumed run.

    Raises:
      UserError: naming the flags and what would be legal.
    """
    command_line.check_ranges(groups, values)
    _check_training(values)
    _check_sparsity(values)
    _check_evolution(values)
    execution_flags.check(values)
    _check_start(values)
    _check_folders(values, groups)


def adopt(values: absl_flags.FlagValues) -> None:
    """With --resume, takes the saved run's value for every flag not given, and its folder.

    Raises:
      UserError: the run's config.json holds a value that its flag cannot have.
    """
    if "resume" not in values or not values.resume:
        return
    for name, value in _saved_flags(values.resume).items():
        if name in values and not given(values, name):
            try:
                values[name].value = values[name].parser.parse(_typed(value))
            except (TypeError, ValueError) as error:
                path = Path(values.resume) / "config.json"
                raise UserError(f"{path} is damaged: its --{name}={value} {error}") from None
    if "out" in values:
        values["out"].value = values.resume


def _check_training(values):
    relay = "executor" in values and values.executor == "relay"
    if relay and "skip_spikes" in values and values.skip_spikes:
        raise UserError(
            f"--skip_spikes={values.skip_spikes:g} with --executor=relay, whose updates in host "
            "memory are not taken back; legal: --skip_spikes=0."
        )
    if given(values, "steps") and given(values, "minutes") and values.steps:
        raise UserError("--steps and --minutes contradict each other; give one of them.")
    micro = values.accumulation if "accumulation" in values else 1
    if given(values, "batch") and values.batch and values.batch % micro:
        legal = ", ".join(str(n) for n in range(1, values.batch + 1) if values.batch % n == 0)
        raise UserError(
            f"--batch={values.batch} cannot be cut into --accumulation={micro} equal "
            f"micro-batches; legal for this batch: {legal}."
        )
    if "tokenizer" in values and values.tokenizer == "gpt2" and given(values, "vocab_size"):
        if values.vocab_size not in (0, GPT2_VOCABULARY):
            raise UserError(
                f"--vocab_size={values.vocab_size} contradicts --tokenizer=gpt2, which has "
                f"{GPT2_VOCABULARY} tokens; leave it out, or pass --tokenizer=bpe."
            )


def _check_sparsity(values):
    if "sparse_projections" not in values:
        return
    if not values.sparse_projections:
        only_sparse = ("pattern", "density", "density_budget", "block", "rank", "hadamard")
        named = [n for n in (*only_sparse, "evolution") if given(values, n)]
        if "twin" in values and given(values, "twin") and values.twin == "yes":
            named.append("twin")
        if named:
            raise UserError(
                f"{_flag_list(named)} without a sparse projection; name some with "
                f"--sparse_projections={','.join(PROJECTIONS)} or any of these."
            )
    dense = "pattern" in values and values.pattern == "dense"
    if dense and given(values, "density") and values.density != 1:
        raise UserError(
            f"--pattern=dense stores every block, which contradicts --density={values.density}; "
            "leave --density out or name another pattern."
        )


def _check_evolution(values):
    if "evolution" not in values or ("resume" in values and values.resume):
        return
    method = values.evolution
    if given(values, "evolve_every") and method not in ("set", "rigl"):
        raise UserError(
            f"--evolve_every={values.evolve_every} is for the methods that exchange blocks, and "
            f"--evolution={method} does not; legal: --evolution=set or rigl."
        )
    if given(values, "evolve_at") and method == "static":
        raise UserError(
            f"--evolve_at={values.evolve_at} without a method; name one with --evolution."
        )
    for name in ("evolve_first", "evolve_plateau"):
        if given(values, name) and values[name].value and method != "sparse_to_dense":
            raise UserError(
                f"--{name} is for --evolution=sparse_to_dense, not for {method}; leave it out."
            )
    if method == "low_rank_tail" and "rank" in values and not values.rank:
        raise UserError(
            "--evolution=low_rank_tail adds a low-rank term of width --rank; legal: 1 or more."
        )


_OF_THE_WEIGHTS = (
    "scale", "norm", "positions", "parametrization", "tokenizer", "vocab_size"
)  # fmt: skip
"""Flags whose values come with the weights of --init_from."""


def _check_start(values):
    if "init_from" not in values or not values.init_from or values.resume:
        return
    named = [name for name in _OF_THE_WEIGHTS if given(values, name)]
    if named:
        raise UserError(
            f"{_flag_list(named)} with --init_from={values.init_from}: these come with the "
            "weights; leave them out, or leave --init_from out."
        )


def _check_folders(values, groups):
    if "resume" not in values:
        return
    if values.resume:
        if given(values, "out"):
            raise UserError(
                f"--out and --resume contradict each other: a resumed run goes on in its own "
                f"folder, {values.resume}."
            )
        _check_same_run(values, groups)
    elif "out" in values and values.out and (Path(values.out) / "config.json").exists():
        raise UserError(
            f"{values.out} holds a run already; pass --resume={values.out} to go on with it, or "
            "another --out."
        )


def _check_same_run(values, groups):
    saved = _saved_flags(values.resume)
    known = {flag.name: flag for group in groups for flag in group.flags}
    other = sorted(set(saved) - set(known))
    if other:
        raise UserError(
            f"{values.resume} is a run of another experiment, with {_flag_list(other)}; its "
            "config.json names the command that made it."
        )
    wrong = [
        f"--{name}={_typed(values[name].value)} (saved: {_typed(saved[name])})"
        for name, flag in known.items()
        if flag.fixed
        and name in saved
        and given(values, name)
        and plain(values[name].value) != saved[name]
    ]
    if wrong:
        raise UserError(
            f"a resumed run keeps its flags, so these contradict {values.resume}: "
            f"{', '.join(wrong)}. Leave them out, or start a new run without --resume."
        )


def _saved_flags(run: str) -> Mapping[str, object]:
    path = Path(run) / "config.json"
    try:
        return dict(json_files.load(path)["flags"])
    except FileNotFoundError:
        siblings = Path(run).parent.glob("*/config.json")
        runs = ", ".join(sorted(str(p.parent) for p in siblings)[-5:])
        hint = f"latest there: {runs}" if runs else f"none is in {Path(run).parent}"
        raise UserError(
            f"--resume={run} is not a run folder, it has no config.json; {hint}."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is damaged, or no experiment wrote it ({why}).") from None


def plain(value: object) -> object:
    """A flag's value as JSON gives it back: a tuple is a list."""
    return list(value) if isinstance(value, tuple) else value


def _typed(value) -> str:
    return ",".join(value) or "none" if isinstance(value, list | tuple) else str(value)


def _flag_list(names: Sequence[str]) -> str:
    return ", ".join(f"--{name}" for name in names)
