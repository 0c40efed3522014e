"""Command lines checked, and turned into a `RunConfig` once the machine is known."""

import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Importing them registers the names of patterns and methods, which the configs check.
import sparse_dataflow.core.layouts.evolution
import sparse_dataflow.core.layouts.patterns  # noqa: F401
from sparse_dataflow.commands.flag_conflicts import refuse_flags
from sparse_dataflow.core.config import settings
from sparse_dataflow.core.config.model import GROWN
from sparse_dataflow.core.config.settings import ASKED, FRESH, Setting
from sparse_dataflow.core.config.training import is_factory
from sparse_dataflow.files import addresses
from sparse_dataflow.files.addresses import is_address
from sparse_dataflow.files.errors import Mistakes, UserError
from sparse_dataflow.runs import run_config as run
from sparse_dataflow.runs.parallel import ParallelConfig
from sparse_dataflow.runs.run_config import GPT2_VOCABULARY, SIZES, RunConfig

EVOLUTION = "evolution.method"
_SCALE = "run.scale"

ENDS = ("training.steps", "training.decay", "training.final_rate")
"""Paths of the settings that another end of a run may change; see `branch`."""

NAMED: dict[str, tuple[str, str]] = {
    "scale": ("", ""),
    "corpus": ("data.corpus", ""),
    "minutes": ("run.minutes", ""),
    "steps": ("training.steps", "Optimizer steps of each model; 0 is as many as --minutes allows."),
    "batch": ("training.batch", ""),
    "learning_rate": ("training.learning_rate", ""),
    "density": ("sparsity.density", ""),
    "pattern": ("sparsity.pattern", ""),
    "block": ("sparsity.block", ""),
    "evolution": (EVOLUTION, ""),
    "twin": ("run.twin", ""),
    "seed": ("training.seed", ""),
    "init_from": ("run.init_from", ""),
    "mesh": ("parallel.mesh", ""),
    "executor": ("parallel.executor", ""),
    "evaluate": ("run.evaluate", ""),
    "grace": ("run.grace", ""),
    "describe": ("", ""),
    "chips": ("", ""),
    "out": ("run.out", ""),
    "resume": ("", ""),
}
"""Shared flags: name -> (path in a `RunConfig`, help where it is not the setting's own)."""

START: dict[str, Setting] = {
    "scale": Setting(
        "scale",
        str,
        "auto",
        "Named size and recipe; auto is nano on a CPU, else the largest up to 13b that fits.",
        choices=("auto", *SIZES),
    ),
    "describe": Setting(
        "describe",
        bool,
        False,
        "Print every array with its sharding and bytes, and the plan; train nothing.",
    ),
    "chips": Setting(
        "chips",
        str,
        "",
        "Plan for chips that need not be here and train nothing: h100:8, v5p-8, v5litepod-64. "
        "Several compare them: a100:8@1.5,h100:8@2.5, with dollars of a chip hour after @.",
    ),
    "resume": Setting(
        "resume",
        str,
        "",
        "Run folder or address to resume, with its own settings; alone, the newest run of runs/.",
        path=True,
        address=True,
    ),
}
"""Shared flags that are not settings of a `RunConfig`."""

AUTO = ("training.micro_batches", "model.remat")
"""Settings that every preset leaves to the planner."""

BY_SCALE = ("sparsity.block", "training.batch", "training.sequence", "training.learning_rate",
            "training.sparse_rate", "training.vector_rate", "run.twin")  # fmt: skip
"""Settings whose default depends on the scale."""

NO_DEFAULTS: Mapping[str, object] = {}

OLD_FLAGS = {
    "accumulation": "training.micro_batches",
    "density_budget": "sparsity.budget",
    "dtype": "model.compute_dtype",
    "evolve_at": "evolution.at",
    "evolve_every": "evolution.every",
    "evolve_first": "evolution.first",
    "sparse_projections": "sparsity.projections",
}
"""Former flag -> path, where the last word of the path is another."""

PROCESS = tuple(
    f"parallel.{name}"
    for name in ("coordinator", "processes", "process", "join_timeout", "heartbeat")
)
"""Settings in which the processes of a run may differ."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A checked command line.

    Attributes:
      scale: a preset's name, or "auto".
      changes: path -> value of each setting on the command line.
      resume: folder of the run to resume, or "".
      describe: whether to print the arrays and the plan instead of training.
      chips: machines to plan for instead of training, or "".
    """

    scale: str = "auto"
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    resume: str = ""
    describe: bool = False
    chips: str = ""

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Request":
        """Returns this request with defaults for shared flags that are not on the command line."""
        paths = {NAMED[name][0]: value for name, value in defaults.items() if NAMED[name][0]}
        scale = defaults.get("scale", "auto") if self.scale == "auto" else self.scale
        return dataclasses.replace(self, scale=scale, changes={**paths, **self.changes})

    @property
    def branches(self) -> bool:
        """Whether a new run goes on from a checkpoint of `resume`; see `branch`."""
        return bool(self.resume and self.changes.get("run.out"))

    @property
    def parallel(self) -> ParallelConfig:
        """The parallel plan of the command line; a resumed run saves none."""
        prefix = "parallel."
        changes = {
            p.removeprefix(prefix): v for p, v in self.changes.items() if p.startswith(prefix)
        }
        return ParallelConfig(**changes)

    @property
    def facts(self) -> dict[str, object]:
        """Flag or path -> value, which must be equal on all processes of a run."""
        facts = {f"--{name}": getattr(self, name) for name in START}
        for path, s in settings.by_path(RunConfig).items():
            if path not in PROCESS:
                value = settings.text(self.changes[path]) if path in self.changes else None
                facts[spelling(path)] = value or shown_default(path, s)
        return facts

    def config(
        self, backend: str = "cpu", memory_bytes: int | None = None, sparse: bool = True
    ) -> RunConfig:
        """Returns the config of the run on a machine.

        Args:
          backend: result of `jax.default_backend()`.
          memory_bytes: memory of one device; None if unknown.
          sparse: whether the model is block-sparse; decides which scale fits.

        Raises:
          UserError: settings contradict each other, the saved run or its weights.
        """
        if self.resume:
            config = settings.changed(
                _resumable(saved_config(self.resume), self.resume), self.changes
            )
            if not self.branches:
                return config
            from sparse_dataflow.commands import branch

            return branch.with_same_warmup(self.resume, config)
        if self.changes.get("run.init_from"):
            from sparse_dataflow.interchange import starting_point

            folder, paths = self.changes["run.init_from"], {f"model.{name}": name for name in GROWN}
            larger = {paths[path]: n for path, n in self.changes.items() if path in paths}
            base = starting_point.run_config(
                folder,
                compute_dtype(backend),
                larger,
                self.changes.get("run.init_variant", ""),
                starting_point.SPARSE if sparse else starting_point.DENSE,
            )
            if "sparsity.density" in self.changes:
                base = base.change(sparsity__budget="uniform")
        else:
            scale = (
                self.scale if self.scale != "auto" else self._scale(backend, memory_bytes, sparse)
            )
            base = run.preset(scale, compute_dtype=compute_dtype(backend))
        if self.changes.get("model.parametrization") == "supar":
            base = run.supar(base)
        if self.changes.get("data.tokenizer") == "gpt2":
            base = base.change(model__vocab_size=GPT2_VOCABULARY)
        adapted = ("training.adapter_rank", "training.prompt_vectors", "training.side_width")
        if any(map(self.changes.get, adapted)):  # The twin of a preset would be refused.
            base = base.change(run__twin=False)
        config = settings.changed(base, self.changes)
        return config if sparse else config.dense()

    def _scale(self, backend, memory_bytes, sparse):
        from sparse_dataflow.planner import scales

        method = self.changes.get(EVOLUTION, "static")
        if not sparse or method in ("gradual", "sparse_to_dense"):  # These train a dense model too.
            return scales.choose_scale(memory_bytes, backend, {})
        names = ("model.fused_qkv", "model.gated_mlp")
        changes = {p: v for p, v in self.changes.items() if p.startswith("sparsity.") or p in names}
        config = settings.changed(run.preset("nano"), changes)
        linears = config.sparsity.linears(config.model)
        return scales.choose_scale(memory_bytes, backend, linears)


def compute_dtype(backend: str) -> str:
    """Returns the default dtype of activations on a backend."""
    return "float32" if backend == "cpu" else "bfloat16"


def shown_default(name: str, s: Setting) -> str:
    """Returns the default of a flag or path as the help page shows it."""
    path = NAMED.get(name, (name,))[0] or name
    if path in BY_SCALE or s.default is dataclasses.MISSING:
        return "(by scale)"
    if path in AUTO:
        return settings.AUTO
    if path == "model.compute_dtype":
        return "(by device)"
    if s.choices and s.default == tuple(s.choices):
        return "all"
    return settings.text(s.default)


def spelling(path: str) -> str:
    """Returns the command-line form of a path: "--batch" or "--set training.warmup"."""
    flags = {p: f"--{name}" for name, (p, _) in NAMED.items() if p}
    return flags.get(path, f"--set {path}")


def path_of_old_flag(name: str) -> str:
    """Returns the path that replaced a former flag; "" if there was no such flag."""
    paths = settings.by_path(RunConfig)
    by_last_word = {path.partition(".")[2]: path for path in paths}
    return OLD_FLAGS.get(name) or by_last_word.get(name, "")


def checked(
    start: Mapping[str, Any],
    changes: Mapping[str, object],
    spelled: Mapping[str, str],
    sets: Sequence[str],
    mistakes: Mistakes | None = None,
) -> Request:
    """Checks a command line and returns its request.

    Args:
      start: values of the flags in `START`.
      changes: path -> value of the other shared flags; an evolution with options is still text.
      spelled: path -> its form on the command line, for errors.
      sets: text of each --set.
      mistakes: those of the command line so far, which are raised with all others.

    Raises:
      UserError: settings are not legal, all of which are named, or contradict each other.
    """
    legal = settings.by_path(RunConfig)
    mistakes = mistakes or Mistakes()
    start, changes, spelled = dict(start), dict(changes), dict(spelled)
    for text in sets:
        with mistakes.collected():
            _add_set(start, changes, spelled, legal, text)
    if EVOLUTION in changes:
        method, colon, options = str(changes.pop(EVOLUTION)).partition(":")
        spelled.pop(EVOLUTION, None)
        with mistakes.collected():
            _add(changes, spelled, legal, EVOLUTION, method, "--evolution=", show_path=False)
        for option in options.split(",") if colon else ():
            name, equals, value = option.partition("=")
            # Commas divide the options, so a list inside of one is written with +.
            path, value = f"evolution.{name.strip()}", value.replace("+", ",")
            with mistakes.collected():
                if not equals:
                    raise UserError(
                        f"--evolution={method}:{settings.shown(options)} is not legal; write "
                        f"{method}:NAME=VALUE,..., as in rigl:every=100."
                    )
                _add(changes, spelled, legal, path, value, f"--evolution={method}:", False)
    mistakes.refuse()
    request = Request(changes=changes, **start)
    _refuse_contradictions(request, spelled)
    return request


def _add_set(start, changes, spelled, legal, text):
    """Parses the text of one --set into `changes`, or `start` for the scale."""
    path, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--set {settings.shown(text)} has no value; write --set path=value.")
    if path.strip() == _SCALE:  # It decides the defaults of other settings.
        if "scale" in start:
            raise UserError("--set run.scale and --scale set the same; give one of them.")
        start["scale"] = settings.parsed(START["scale"], value, "--set run.scale")
        return
    _add(changes, spelled, legal, path.strip(), value, "--set ")


def _add(changes, spelled, legal, path, text, before, show_path=True):
    """Parses one setting into `changes`; raises UserError if it is illegal or set twice."""
    path = OLD_FLAGS.get(path, path)
    if path not in legal:
        raise UserError(f"{before}{path} is no setting; {settings.hint(path, legal)}")
    last = path if show_path else path.partition(".")[2]
    words = before.removesuffix("=") if path == EVOLUTION and not show_path else f"{before}{last}"
    value = settings.parsed(legal[path], text, words)
    if path in changes:
        raise UserError(f"{words} and {spelled[path]} set the same; give one of them.")
    changes[path], spelled[path] = value, words


def _refuse_contradictions(request, spelled):
    """Raises UserError if settings on the command line contradict each other."""
    changes = request.changes
    if changes.get("data.tokenizer") == "gpt2":
        if changes.get("model.vocab_size", GPT2_VOCABULARY) != GPT2_VOCABULARY:
            raise UserError(
                f"model.vocab_size={changes['model.vocab_size']} contradicts data.tokenizer=gpt2, "
                f"which has {GPT2_VOCABULARY} tokens; leave it out, or set data.tokenizer=bpe."
            )
    elif changes.get("data.tokenizer") != "none" and changes.get("model.vocab_size", 257) < 257:
        raise UserError(
            f"model.vocab_size={changes['model.vocab_size']} is not legal: bpe needs 257 or more."
        )
    scale = {} if request.scale == "auto" else {"scale": request.scale}
    refuse_flags({**changes, **scale}, {**spelled, "scale": "--scale"}, bool(request.resume))
    if request.resume:
        _refuse_other_run(request, spelled)


def saved_config(folder: str | Path) -> RunConfig:
    """The config of a run in a folder or at an address.

    Raises:
      UserError: it is no run folder, damaged, or of an older version.
    """
    from sparse_dataflow.commands import run_list
    from sparse_dataflow.evaluation import run_files

    if is_address(str(folder)):
        from sparse_dataflow.commands import address_runs

        return address_runs.saved_run(folder)[0]
    folder = Path(folder).expanduser()
    run_list.refuse_other_folder("--resume", folder)
    return run_files.read_config(folder)


def _resumable(saved: RunConfig, folder: str) -> RunConfig:
    """Returns a saved config as a resumed run uses it."""
    unsaved = {p: s.default for p, s in settings.by_path(RunConfig).items() if s.resumed == FRESH}
    unsaved |= dict.fromkeys(places_outside(saved, folder), "")
    return settings.changed(saved, {**unsaved, "run.out": folder})


def places_outside(config: RunConfig, folder: str) -> dict[str, str]:
    """Returns {path: place} of the settings that are `settings.ASKED`, of a run in a folder or at
    an address, as far as they name another place than the run itself."""
    place = _location(folder)
    return {
        path: value
        for path, s in settings.by_path(RunConfig).items()
        if s.resumed == ASKED and (value := _value(config, path)) and _location(value) != place
    }


def resume_flags(config: RunConfig, folder: str) -> list[str]:
    """Returns the flags that resume a run in a folder or at an address as it was."""
    outside = places_outside(config, folder)
    return [f"--resume={folder}", *(f"--set={path}={place}" for path, place in outside.items())]


def _value(config, path):
    member, _, name = path.partition(".")
    return getattr(getattr(config, member), name)


def _location(place):
    return addresses.normal(place) if is_address(place) else os.path.realpath(place)


def _refuse_other_run(request, spelled):
    """Raises UserError if the command line changes settings that a resumed run must keep."""
    config = saved_config(request.resume)
    saved = settings.to_json(config)
    optimizer = str(saved["training"]["optimizer"])
    if is_factory(optimizer) and "training.optimizer" not in request.changes:
        raise UserError(
            f"{request.resume} was trained with code that its config names, and a run folder alone "
            f"runs none; resume it with --set training.optimizer={optimizer[:100]}."
        )
    from sparse_dataflow.commands.run_folder import fixed_paths  # Loads jax; plans need none.

    outside = {} if request.branches else places_outside(config, request.resume)
    if unnamed := {p: place for p, place in outside.items() if p not in request.changes}:
        words = " ".join(shlex.quote(f"--set={p}={place}") for p, place in unnamed.items())
        without = " ".join(f"--set={p}=" for p in unnamed)
        raise UserError(
            f"{request.resume} names a place outside of it, which is written only where the "
            f"command line names it too: add {words} to --resume={request.resume}, or {without} "
            "to leave it out."
        )
    wrong, fixed = [], fixed_paths(config)
    if request.scale not in ("auto", saved["run"]["scale"]):
        wrong.append(f"--scale={request.scale} (saved: {saved['run']['scale']})")
    for path in settings.by_path(RunConfig):
        if path not in fixed or path not in request.changes:
            continue
        if request.branches and path in ENDS:
            continue
        member, _, name = path.partition(".")
        before, now = settings.text(saved[member][name]), settings.text(request.changes[path])
        if before != now:
            wrong.append(f"{spelled[path]}={now} (saved: {before})")
    if wrong:
        raise UserError(
            f"a resumed run keeps its settings, so these contradict {request.resume}: "
            f"{', '.join(wrong)}. Leave them out, or start a new run without --resume."
        )
