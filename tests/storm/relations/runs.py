"""Relations between runs: interrupted, on other devices, with another end."""

import json
import math

import numpy as np
from main_job import arrays, rows

from sparse_dataflow.commands import branch
from sparse_dataflow.core.config import settings
from sparse_dataflow.core.layouts.layout import BlockLayout, index_tables
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.training.saved_state import micro_batches_matter
from sparse_dataflow.evaluation import trained
from sparse_dataflow.files.errors import UserError
from storm.case import Case
from storm.relations import relation
from storm.scene import TABLE
from storm.world import World, check, need

TIMES = ("seconds", "tokens_per_second", "mfu", "update_seconds")
OTHER_RESULTS = ("parallel.depth_schedule", "parallel.clipping")
"""Parallel settings that change what is computed."""


def _steps(folder):
    return json.loads((folder / "run.json").read_text())["steps"]


def _untimed(folder, variant):
    return [
        {name: value for name, value in row.items() if name not in TIMES}
        for row in rows(folder, variant)
    ]


def same_bits(folder, other):
    """Fails where two runs did not end at the same bits and numbers."""
    for variant, steps in _steps(other).items():
        mine, theirs = arrays(folder, variant, steps), arrays(other, variant, steps)
        check(mine.keys() == theirs.keys(), f"{variant}: other arrays")
        different = [name for name in mine if mine[name].tobytes() != theirs[name].tobytes()]
        check(not different, f"{variant}: other bits in {different[:5]} of {len(mine)} arrays")
        pairs = zip(_untimed(folder, variant), _untimed(other, variant), strict=False)
        for mine_row, other_row in pairs:
            check(
                json.dumps(mine_row) == json.dumps(other_row),
                f"{variant}: row {mine_row} and {other_row}",
            )
        counts = len(rows(folder, variant)), len(rows(other, variant))
        check(counts[0] == counts[1], f"{variant}: {counts} rows")


@relation(9)
def resumed_run_is_uninterrupted(world: World):
    """SIGTERM after a drawn step, then --resume: the same bits and rows."""
    run = world.run
    steps = min(_steps(run.folder).values())
    need(steps > 1, "one step")
    stop = 1 + (world.scene.stop - 1) % (steps - 1)
    half = world.train("stopped", stop=stop)
    check(not half.finished, "the run did not stop")
    whole = world.train("stopped", resume=True)
    check(whole.finished, "the resumed run did not finish")
    same_bits(whole.folder, run.folder)


def _free(case: Case):
    """Paths of a case's settings that a resumed run may change, so that they change no result."""
    free = []
    for path in case.values:
        if path == "scene.devices":
            free.append(path)
        elif path.startswith("scene.") or path in OTHER_RESULTS:
            continue
        elif TABLE[path].resumed != settings.FIXED or path == "parallel.server_dir":
            free.append(path)
    return free


def tolerance(config, losses):
    """Relative tolerance of the first loss, and of later ones."""
    narrow = config.model.compute_dtype != "float32" or config.training.state_dtype != "float32"
    narrow = narrow or config.model.quantized
    first, later = (2e-2, 5e-2) if narrow else (1e-5, 3e-3)
    moves = config.evolution.method in ("rigl", "set", "gradual", "omit_features")
    signs = config.training.optimizer == "lion"
    return first, 5e-2 if moves or signs else later


@relation(9)
def other_plan_has_the_same_curve(world: World):
    """Without the settings that a resumed run may change: the same losses, to rounding."""
    case, config = world.case, world.config
    free = _free(case)
    if micro_batches_matter(config.model.experts, config.model.precision, config.evolution.method):
        free = [path for path in free if path != "training.micro_batches"]
    if config.model.expert_capacity and config.model.experts:
        need(world.case.devices() == 1, "a device counts the tokens of its experts")
    plain = case.without(*free)
    need(plain != case, "no such settings")
    try:
        plain.config(world.places)
    except UserError as error:
        need(False, f"a setting that stays needs one of them: {error}")
    run = world.run
    plain_run = world.train("plain", plain)
    first, later = tolerance(config, None)
    for variant in _steps(run.folder):
        mine, theirs = (
            [row for row in rows(each.folder, variant) if row["kind"] in ("train", "final")]
            for each in (run, plain_run)
        )
        check(len(mine) == len(theirs), f"{variant}: {len(mine)} and {len(theirs)} rows")
        for number, (row, other) in enumerate(zip(mine, theirs, strict=True)):
            near = math.isclose(row["loss"], other["loss"], rel_tol=later if number else first)
            both_nan = math.isnan(row["loss"]) and math.isnan(other["loss"])
            check(
                near or both_nan or row["loss"] > 2 * mine[0]["loss"],
                f"{variant}: loss {row['loss']!r} and {other['loss']!r} in row {number + 1} "
                f"({row['kind']})",
            )


@relation(9)
def other_end_of_a_plateau_is_a_run_from_the_beginning(world: World):
    """--resume --out of a level part: the bits of a run with its settings from the start."""
    config = world.config
    need(config.training.schedule == "wsd" and config.evolution.method == "static", "no plateau")
    need(not config.training.new_rows_first and not config.run.init_from, "not offered")
    run = world.run
    steps = min(_steps(run.folder).values())
    need(steps > 2, "too few steps")
    more = steps + 1 + world.scene.choice % 3
    new = branch.with_same_warmup(run.folder, run.config.change(training__steps=more))
    new = new.change(run__out=str(world.folder / "branch"))
    try:
        branch.make(run.folder, new, ("test",))
    except UserError as error:
        need("has no checkpoint" not in str(error), "saved after the level part only")
        raise
    keep = {"training__steps": more, "training__warmup_steps": new.training.warmup_steps}
    branched = world.train("branch", resume=True, **keep)
    from_start = world.train("from_start", **keep)
    for variant, count in _steps(branched.folder).items():
        mine, theirs = (arrays(each.folder, variant, count) for each in (branched, from_start))
        different = [name for name in mine if mine[name].tobytes() != theirs[name].tobytes()]
        check(not different, f"{variant}: other bits in {different[:5]}")


@relation(5)
def kinds_are_legal_after_every_update(world: World):
    """Every checkpoint: masks hide zeros, layouts are balanced and their tables agree."""
    need(not world.config.training.adapter_rank, "adapters")
    need(not world.refusal, "refused")
    world_run = world.train("kept", run__checkpoint_every=1).folder
    for variant in _steps(world_run):
        for place in sorted((world_run / variant / "checkpoints").glob("[0-9]*")):
            model = trained.load(world_run, variant, place.name)
            for where, kernel, mask in _masked(model.params):
                hidden = np.asarray(kernel)[~np.asarray(mask)]
                check(
                    not np.any(hidden),
                    f"{variant} after step {place.name}: {where} has {np.count_nonzero(hidden)} "
                    "numbers that its mask hides",
                )
                counts = np.asarray(mask).sum(-2)
                check(
                    counts.min() == counts.max(),
                    f"{variant} after step {place.name}: outputs of {where} store {counts.min()} "
                    f"to {counts.max()} inputs",
                )
            for name, layers in stacks.layouts_of(model.model, model.params).items():
                for layout in layers:
                    fan_in = layout.fan_in
                    check(
                        fan_in.min() == fan_in.max(),
                        f"{variant} after step {place.name}: {name} has a fan-in of {fan_in.min()} "
                        f"to {fan_in.max()}",
                    )
                    again = BlockLayout.from_tables(index_tables(layout), layout.block)
                    check(again == layout, f"{variant}: the tables of {name} are of another layout")


def _masked(tree, where=""):
    if isinstance(tree, dict):
        if "mask" in tree and "kernel" in tree:
            yield where, tree["kernel"], tree["mask"]
        for name, inner in tree.items():
            yield from _masked(inner, f"{where}.{name}".strip("."))
    elif isinstance(tree, tuple | list):
        for number, inner in enumerate(tree):
            yield from _masked(inner, f"{where}.{number}".strip("."))


@relation(9)
def twin_is_the_dense_run(world: World):
    """The dense twin that is trained beside a model: the bits of the dense run alone."""
    case = world.case
    need(world.config.sparsity.projections and world.config.run.twin != "no", "no twin")
    need(not world.config.training.teacher, "a teacher")
    dropped = [
        p for p in case.values if p.startswith(("sparsity.", "evolution.")) or p == "run.twin"
    ]
    alone = case.without(*dropped).with_change("sparsity.projections", "none")
    run = world.run
    dense = world.train("alone", alone)
    for name in ("dense",):
        steps = _steps(run.folder)[name]
        mine, theirs = (arrays(each.folder, name, steps) for each in (run, dense))
        different = [key for key in theirs if mine[key].tobytes() != theirs[key].tobytes()]
        check(not different, f"other bits in {different[:5]} of {len(theirs)} arrays")
