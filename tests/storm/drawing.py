"""Draws cases: legal values of settings that go together.

A value is drawn from the setting's type and legal values alone, so a new setting is drawn without
further work.  A text without choices needs its examples in TEXTS.
"""

import dataclasses
import random
import time

from sparse_dataflow.core.config import settings
from sparse_dataflow.core.config.projections import PROJECTIONS
from sparse_dataflow.core.config.settings import BLOCK, Setting
from sparse_dataflow.core.config.training import OPTIMIZERS
from sparse_dataflow.core.executors.compatibility import Option
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs import compatibility
from sparse_dataflow.runs.families import FAMILIES
from storm.case import Case, refuse
from storm.places import MODELS, TOKENIZERS, Places
from storm.scene import TABLE, scene_of
from storm.writing import TEXT_FORMATS

NOT_DRAWN = {
    "run.scale": "gives other defaults, and the shape is one",
    "run.out": "each run of a case has its own",
    "run.minutes": "makes the number of steps depend on the clock",
    "run.profile_server": "opens a port",
    "parallel.coordinator": "needs other processes",
    "parallel.processes": "needs other processes",
    "parallel.process": "needs other processes",
}
"""Path -> why it is never drawn."""

MESHES = ("data:2", "fsdp:2", "tensor:2", "feature:2", "context:2", "stage:2", "data:2,fsdp:2",
          "fsdp:2,tensor:2", "stage:2,fsdp:2", "context:2,tensor:2", "data:2,stage:2", "fsdp:4",
          "tensor:4", "feature:2,tensor:2")  # fmt: skip

_CORPORA = tuple(f"@{name}" for name in TEXT_FORMATS)

TEXTS: dict[str, tuple[str, ...]] = {
    "data.corpus": (
        *_CORPORA, "@jsonl:0.7,@folder_2:0.3", "@parquet:1,@jsonl_2:2,@saved_3:1",
        "@folder:3,@jsonl_3:1", "hf:storm/jsonl", "hf:storm/parquet", "hf:storm/zipped",
        "@folder:1,hf:storm/jsonl_2:1",
    ),
    "data.column": ("text", "content", "größe"),
    "data.validation": ("@folder_2", "@jsonl_3", "@parquet_2", "@folder"),
    "data.tokenizer": tuple(f"@{name}" for name in TOKENIZERS),
    "model.remat": ("full", "keep", "offload", "full:1,none:1", "keep:1,full:1", "auto"),
    "model.attention_blocks": ("window:1,block:4", "window:1,global:1,random:2,block:8"),
    "model.layer_types": ("sliding", "sliding+full", "full+sliding+sliding"),
    "model.rotary_layers": ("rotated", "unrotated+rotated"),
    "sparsity.budget": (
        "mlp_in:0.25", "mlp_in:0.5x,depth:1.5x,0.5x", "depth:1.5x,0.5x", "qkv:1",
    ),
    "training.optimizer": (*OPTIMIZERS, "optax:nadamw", "optax:noisy_sgd", "optax:lamb"),
    "training.teacher": tuple(f"@{name}" for name in MODELS),
    "run.init_from": tuple(f"@{name}" for name in MODELS),
    "run.mirror": ("@mirror",),
    "run.trackers": ("tensorboard", "none"),
    "run.profile": ("1:1", "0:2"),
    "parallel.mesh": MESHES,
    "parallel.schedule": ("gpipe", "1f1b", "interleaved:2", "zero_bubble"),
    "parallel.memory_limit": ("1GiB", "16e9", "2MiB"),
    "parallel.server_dir": ("@server",),
    "parallel.depth_schedule": ("drop:0.5", "grow:0.5"),
    "sparsity.block": ("4", "8", "16", "1x8", "8x4"),
}  # fmt: skip
"""Examples of texts without choices."""

SMALL = {
    "model.num_layers": 4,
    "model.experts": 4,
    "model.d_ff": 128,
    "model.d_model": 64,
    "model.vocab_size": 400,
    "training.steps": 6,
    "training.batch": 8,
    "training.sequence": 32,
    "data.extend_vocabulary": 24,
    "scene.documents": 48,
}
"""Largest values that are drawn of settings that decide how long a case takes; 64 elsewhere."""

_INTEGERS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 257, 300, 320, 400)
_NUMBERS = (0.0, 1e-3, 0.01, 0.1, 0.125, 0.25, 0.5, 0.75, 0.9, 1.0, 1.5, 2.0, 3.0, 6.0, 10.0)
_MULTIPLES = (0.25, 0.5, 0.9, 1.1, 2.0, 4.0)


def value(draw: random.Random, s: Setting) -> str | None:
    """Returns a legal value of a setting as a text; None where none is known."""
    if s.name in TEXTS:
        return draw.choice(TEXTS[s.name])
    if s.type is bool:
        return draw.choice(["yes", "no"])
    if s.type == tuple[str, ...]:
        names = list(s.choices)
        if not names:
            return None
        chosen = draw.sample(names, draw.randint(0, min(3, len(names))))
        if set(names) == set(PROJECTIONS):
            chosen = [name for name in chosen if name not in ("q", "k", "v", "mlp_gate")]
        return ",".join(chosen) or draw.choice(["none", "all"])
    if s.choices:
        return draw.choice(list(s.choices))
    if s.type == BLOCK:
        return draw.choice(TEXTS["sparsity.block"])
    numbers = {int: _integers, tuple[int, ...]: _integers, float: _numbers,
               tuple[float, ...]: _numbers}.get(s.type)  # fmt: skip
    if numbers is None:
        return None
    legal = [n for n in numbers(s) if not s.legal or s.legal[1](n)]
    if s.name == "training.steps":
        legal.remove(0)  # As many as `run.minutes` has, which is not drawn.
    if not legal:
        return None
    if s.type in (int, float):
        return settings.text(draw.choice(legal))
    return ",".join(settings.text(n) for n in draw.sample(legal, min(2, len(legal))))


def _integers(s):
    most = SMALL.get(s.name, 64)
    if s.type is int and isinstance(s.default, int) and s.default > most:
        most = s.default
    return [n for n in _INTEGERS if n <= most]


def _numbers(s):
    near = (
        [float(f"{m * s.default:.6g}") for m in _MULTIPLES]
        if isinstance(s.default, float) and s.default
        else []
    )
    # Numbers far from a default diverge, and then say nothing.
    return near or list(_NUMBERS)


def options() -> list[dict[str, str]]:
    """Returns settings that go together, from the examples of the table of what goes with what,
    and those of formats that need other settings."""
    rows: list[Option] = []
    for row in compatibility.TABLE:
        rows += [row.option, *row.others]
    bundles = []
    for option in rows:
        bundle = {path: settings.text(value) for path, value in option.example.items()}
        for path, text in bundle.items():
            if text == "DIR":
                bundle[path] = "@server" if path == "parallel.server_dir" else "@DIR"
        if bundle and all(path in TABLE for path in bundle) and bundle not in bundles:
            bundles.append(bundle)
    for fields in FAMILIES.values():
        named = {f"model.{name}": settings.text(value) for name, value in fields.items()}
        bundles.append({path: text for path, text in named.items() if path in TABLE})
    return [*bundles, *_MORE]


_MORE: list[dict[str, str]] = [
    {"data.corpus": "@ids", "data.tokenizer": "none"},
    {"data.corpus": "@ids_2", "data.tokenizer": "none", "data.validation": "@ids"},
    {"data.corpus": "@answers", "data.loss": "answers", "run.init_from": "@DIR"},
    {"data.corpus": "@answers", "data.loss": "answers", "run.init_from": "@DIR",
     "model.mask_documents": "yes"},
    {"model.window": "5", "model.layer_types": "sliding+full"},
    {"model.attention_blocks": "window:1,global:1,block:8", "model.layer_types": "full+sliding"},
    {"training.schedule": "wsd", "training.decay": "0.5"},
    {"run.init_from": "@sparse"},
    {"run.init_from": "@run"},
    {"run.init_from": "@dense", "sparsity.projections": "none"},
    {"parallel.mesh": "stage:2", "training.micro_batches": "4"},
    {"parallel.executor": "relay", "parallel.stash": "host", "parallel.clipping": "eager"},
    {"evolution.method": "rigl", "evolution.every": "1"},
    {"evolution.method": "set", "evolution.every": "2", "sparsity.pattern": "masked",
     "sparsity.block": "1"},
    {"evolution.method": "gradual"},
    {"sparsity.pattern": "masked", "sparsity.span": "4", "sparsity.block": "1"},
    {"run.twin": "yes"},
    {"sparsity.projections": "none"},
]  # fmt: skip
"""Settings that seldom come together by themselves."""


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A change that was refused while a case was drawn.

    Attributes:
      case: with the change.
      error: that was raised.
      seconds: of the processor until then.
    """

    case: Case
    error: BaseException
    seconds: float


def draw_case(draw: random.Random, places: Places) -> tuple[Case, list[Refusal]]:
    """Returns a legal case, and the refusals of changes that did not go with it.

    Args:
      places: of the default scene; nothing is made in them.
    """
    case, refusals = Case(), []
    bundles = options()
    paths = [path for path in TABLE if path not in NOT_DRAWN]
    changes: list[dict[str, str]] = []
    for _ in range(draw.choice([0, 1, 1, 2, 3])):
        model = f"@{draw.choice(MODELS)}"
        # Some relations need one of the settings that seldom come together.
        bundle = draw.choice(draw.choice([bundles, bundles, _MORE]))
        changes.append({path: text.replace("@DIR", model) for path, text in bundle.items()})
    for _ in range(draw.randint(2, 16)):
        # A part has as many chances as another, however many settings it has.
        section = draw.choice(sorted({path.partition(".")[0] for path in paths}))
        path = draw.choice([path for path in paths if path.startswith(f"{section}.")])
        if (text := value(draw, TABLE[path])) is not None:
            changes.append({path: text})
    for change in changes:
        more = Case.of({**case.values, **change})
        start = time.process_time()
        try:
            scene_of(more.values)
            # The shape of given weights is not that of the case.
            refuse(more.config(places, make=False), more.devices())
            case = more
        except UserError as error:
            refusals.append(Refusal(more, error, time.process_time() - start))
    return case, refusals
