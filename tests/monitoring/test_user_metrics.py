"""A user's metric of a step: its number is in the row, or it is refused by name."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from sparse_dataflow.core.step_metrics import Mean, Norm, StepReport, Sum
from sparse_dataflow.core.training.loop import StepDone
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.monitoring import user_metrics
from sparse_dataflow.monitoring.user_metrics import UserMetrics


def step(number=1, loss=3.0, **metrics):
    report = StepReport(
        {"loss": Sum(loss), "gradient_norm": Norm({"embed": 9.0, "head": 16.0}), **metrics}
    )
    return StepDone(number, report, 1e-3, 0.5, {"embed": np.arange(3.0)})


@pytest.mark.parametrize(
    "function, number",
    [
        (lambda s: s.numbers["loss"] ** 2, 9),
        (lambda s: s.numbers["gradient_norm"], 5),
        (lambda s: s.gradient_norms["head"] / s.gradient_norms["embed"], 4 / 3),
        (lambda s: jnp.max(s.params["embed"]), 2),
        (lambda s: np.float16(s.rate * 1000) + s.number, 2),
        (lambda s: True, 1),
    ],
)
def test_a_function_of_a_step_is_a_number(function, number):
    assert UserMetrics({"a/b.c-d_1": function})(step()) == {"a/b.c-d_1": pytest.approx(number)}


@pytest.mark.parametrize("name", ["loss", "gradient_norm", "mfu", "seconds", "kind", "dropped"])
def test_a_name_in_use_is_refused_before_the_first_step(name):
    with pytest.raises(UserError, match=f"metrics has '{name}', a name in use; legal: other"):
        UserMetrics({"mine": abs, name: abs})


@pytest.mark.parametrize("name", ["", "a b", "1st", "x" * 61, "naïve", "a\n", "<b>", 3, None])
def test_an_illegal_name_is_refused_before_the_first_step(name):
    with pytest.raises(UserError, match=r"metrics has the name .*legal: up to 60 letters"):
        UserMetrics({name: abs})


@pytest.mark.parametrize("function", [3, None, "abs", {}])
def test_what_is_no_function_is_refused_before_the_first_step(function):
    with pytest.raises(UserError, match=r"metrics\['mine'\] is .*legal: a function"):
        UserMetrics({"mine": function})


@pytest.mark.parametrize(
    "function, words",
    [
        (lambda s: s.numbers["entropy"], "reads 'entropy', .* do not have; legal: loss, gradient"),
        (lambda s: s.params["blocks"], "reads 'blocks'"),
        (lambda s: s.logits, "fails: .*no attribute 'logits'"),
        (lambda: 1.0, "fails: .*takes 0 positional arguments"),
        (lambda s: 1 / 0, "fails: .*division by zero"),
        (lambda s: s.params["embed"], r"returns an array of shape \(3,\); legal: one number"),
        (lambda s: np.ones((1, 1)), r"returns an array of shape \(1, 1\)"),
        (lambda s: [1.0, 2.0], r"returns \[1.0, 2.0\]; legal: one number"),
        (lambda s: "3", "returns '3'; legal: one number"),
        (lambda s: None, "returns None; legal: one number"),
        (lambda s: 10**400, "returns 1000.*; legal: one number"),
        (lambda s: 1j, "returns 1j; legal: one number"),
        (lambda s: math.nan, "returns nan; legal: a finite number"),
        (lambda s: np.float32(np.inf), "returns inf; legal: a finite number"),
    ],
)
def test_a_bad_result_of_the_first_step_is_refused_by_name(function, words):
    with pytest.raises(UserError, match=rf"metrics\['mine'\] {words}"):
        UserMetrics({"good": lambda s: 1.0, "mine": function})(step())


def test_a_name_that_this_model_reports_is_refused_at_its_first_step():
    metrics = UserMetrics({"entropy": lambda s: 1.0})
    with pytest.raises(UserError, match="metrics has 'entropy', which this model reports itself"):
        metrics(step(entropy=Mean(1.0, 2.0)))


def test_a_function_that_fails_later_ends_and_the_training_goes_on(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(user_metrics, "say", lines.append)
    metrics = UserMetrics({
        "good": lambda s: s.number,
        "bad": lambda s: 1 / (3 - s.number),
        "unknown": lambda s: s.numbers["loss"],
    })  # fmt: skip
    assert set(metrics(step(1))) == set(metrics(step(2))) == {"good", "bad", "unknown"}
    assert set(metrics(step(3))) == set(metrics(step(4))) == {"good", "unknown"}
    assert math.isnan(metrics(step(5, loss=math.nan))["unknown"])
    [line] = lines
    assert "metrics['bad'] fails" in line and "from step 3 on" in line
