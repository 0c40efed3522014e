"""Another end of a plateau: the settings of the new run."""

import dataclasses

import pytest

from sparse_dataflow.commands import branch
from sparse_dataflow.core.optim.optimizers import learning_rate_schedule
from sparse_dataflow.evaluation import run_files
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.run_config import preset
from sparse_dataflow.runs.variants import variants

PEAK = 1e-3


def saved_run(folder, steps, planned=0, **changes):
    """A run folder without checkpoints of a wsd run, by minutes where `planned` is 0."""
    folder.mkdir()
    config = preset("pico").change(
        training__schedule="wsd",
        training__steps=planned,
        training__learning_rate=PEAK,
        sparsity__block=8,
        run__minutes=1.0,
        run__out=str(folder),
        run__twin=("no", "yes", "narrow")[len(steps) - 1],
        **changes,
    )
    record = run_files.RunRecord(
        "gpt13b_sparse", ("x",), "today", {}, "cpu", "c", "h", "t", 512, steps
    )
    for name, fields in ((run_files.CONFIG, config), (run_files.RECORD, record)):
        (folder / name).write_bytes(run_files.to_bytes(fields.to_json()))
    return config, record


@pytest.mark.parametrize(
    ("steps", "warmup", "new_steps", "warmups"),
    [
        ({"sparse": 500, "dense": 120, "narrow": 410}, 0.1, 900, (50, 12, 41)),
        ({"sparse": 40, "dense": 90}, 0.3, 60, (12, 27)),
        ({"sparse": 77}, 0.0, 1000, (0,)),
        ({"sparse": 200, "dense": 30}, 0.5, 0, (100, 15)),
    ],
)
def test_each_model_keeps_its_own_warm_up(tmp_path, steps, warmup, new_steps, warmups):
    saved, record = saved_run(tmp_path / "run", steps, training__warmup=warmup)
    changed = saved.change(run__out=str(tmp_path / "new"), training__steps=new_steps)
    config = branch.with_same_warmup(tmp_path / "run", changed)
    planned = dict.fromkeys(steps, new_steps) if new_steps else steps
    new = run_files.read_variants(config, dataclasses.replace(record, steps=planned))
    old = run_files.read_variants(saved, record)
    for (name, v), stop in zip(new.items(), warmups, strict=True):
        level = min(v.training.plateau_stop, old[name].training.plateau_stop)
        by_hand = [PEAK * min(1, (s + 1) / (stop + 1)) for s in range(max(level, stop))]
        for variant in (v, old[name]):
            schedule = learning_rate_schedule(variant.training)
            assert [schedule(s) for s in range(level)] == pytest.approx(by_hand[:level], rel=1e-4)


@pytest.mark.parametrize(("steps", "begins"), [(50, 40), (400, 80)], ids=["shorter", "longer"])
def test_a_branch_begins_at_the_newest_checkpoint_before_both_falls(
    tmp_path, monkeypatch, steps, begins
):
    """The rate of the saved run falls from step 80 of 100, that of the shorter one from step 40."""
    saved, _ = saved_run(tmp_path / "run", {"sparse": 100}, training__decay=0.2)
    (tmp_path / "run" / run_files.TOKENIZER).write_bytes(b"{}")
    copied = {}

    def copy(source, target, step, made_with):
        target.mkdir(parents=True)
        copied[source.name] = step

    monkeypatch.setattr(branch, "_copy", copy)
    monkeypatch.setattr(branch.named_arrays, "saved_steps", lambda _: range(10, 101, 10))
    changed = saved.change(run__out=str(tmp_path / "new"), training__steps=steps)
    branch.make(tmp_path / "run", branch.with_same_warmup(tmp_path / "run", changed), ("x",))
    assert copied == {"sparse": begins} and (tmp_path / "new" / "sparse").is_dir()


def test_a_new_end_within_the_warm_up_of_any_model_is_refused(tmp_path):
    saved, _ = saved_run(tmp_path / "run", {"sparse": 30, "dense": 300})
    changed = saved.change(run__out=str(tmp_path / "new"), training__steps=25)
    with pytest.raises(UserError, match=r"warm-up of dense in .*more than 30"):
        branch.with_same_warmup(tmp_path / "run", changed)


@pytest.mark.parametrize("warmups", [(3,), (3, 4, 5)])
def test_steps_of_warm_up_are_one_number_for_each_model(warmups):
    config = preset("pico").change(
        run__twin=True, sparsity__block=16, training__warmup_steps=warmups
    )
    with pytest.raises(UserError, match=r"one for each model \(sparse, dense\)"):
        variants(config)
