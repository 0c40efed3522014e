"""The table of settings that go together is what is refused, in every row."""

import pytest

from sparse_dataflow.commands.library import preset
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs import settings_together
from sparse_dataflow.runs.settings_together import GIVEN, RULES

BASE = preset("pico").change(sparsity__block=16, run__twin="no", training__steps=20)
WEIGHTS = {"run.init_from": "DIR"}
IN_USE = {
    "parallel.executor=relay or pipeline": {"parallel.executor": "relay"},
    "training.teacher": {"training.teacher": "DIR"},
    "sparsity.pattern=low_rank": {"sparsity.pattern": "low_rank"},
    "evolution.method=low_rank_tail": {"evolution.method": "low_rank_tail", "sparsity.rank": 2},
    "evolution.method=shared_to_own": {"evolution.method": "shared_to_own"},
    "run.twin=narrow": {"run.twin": "narrow"},
    "run.init_variant": WEIGHTS | {"run.init_variant": "dense"},
    "run.prune_by=activations": WEIGHTS | {"run.prune_by": "activations"},
    "run.prune_to=pattern": WEIGHTS | {"run.prune_to": "pattern"},
    "training.new_rows_first": WEIGHTS
    | {"training.new_rows_first": 0.5, "data.extend_vocabulary": 8},
    "data.extend_vocabulary": WEIGHTS | {"data.extend_vocabulary": 8},
    "data.loss=answers": WEIGHTS | {"data.loss": "answers"},
    "training.frozen_dtype=int8": WEIGHTS
    | {"training.frozen_dtype": "int8", "training.adapter_rank": 2},
    "training.adapter_rank": WEIGHTS | {"training.adapter_rank": 2},
    "parallel.server_dir": {"parallel.executor": "relay", "parallel.server_dir": "DIR"},
}
"""Option of the table -> settings that use it and go together."""
ILLEGAL = {
    "parallel.memory_limit": "1GiB",
    "model.logit_cap": 30.0,
    "sparsity.budget": "compute",
    "run.init_from": "DIR",
    "data.loss": "answers",
    "training.adapter_rank": 2,
    "training.teacher": "DIR",
}
EMPTY = {"data.extend_vocabulary": 0, "training.adapter_rank": 0, "sparsity.rank": 0}


def changed(config, settings):
    return config.change(**{path.replace(".", "__"): value for path, value in settings.items()})


def illegal_value(rule):
    if rule.legal is GIVEN:
        return EMPTY.get(rule.path, "")
    if rule.path == "evolution.method":
        return "gradual" if rule.legal.fits("rigl") else "rigl"
    if rule.path == "run.twin":
        return "narrow" if rule.legal.fits("yes") else "yes"
    return ILLEGAL[rule.path]


@pytest.mark.parametrize("option", IN_USE)
def test_each_option_can_be_used(option):
    config = changed(BASE, IN_USE[option])
    assert any(rule.used(config) for rule in RULES if rule.option == option)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.option} {rule.path}")
def test_each_row_refuses(rule):
    with pytest.raises(UserError) as refused:
        value = illegal_value(rule)
        weights = WEIGHTS if value in (2, "answers") else {}
        changed(BASE, IN_USE[rule.option] | weights | {rule.path: value})
    words = str(refused.value)
    assert rule.option in words and rule.path in words and "; legal with" in words
    assert rule.legal is GIVEN or rule.legal.words in words


def test_the_table_has_a_line_for_each_rule():
    assert len(settings_together.table().splitlines()) == len(RULES) + 2
    assert {rule.option for rule in RULES} == set(IN_USE)
