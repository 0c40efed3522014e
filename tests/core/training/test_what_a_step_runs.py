"""What must be read to know what a training step does: the code that runs while it is traced."""

import pathlib
import sys

import jax

import sparse_dataflow
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.training.step import abstract_state, make_train_step
from sparse_dataflow.runs.run_config import preset
from sparse_dataflow.runs.variants import variants

PACKAGE = pathlib.Path(sparse_dataflow.__file__).parent

MOST_FILES, MOST_FUNCTIONS = 45, 270
"""Of one step of the smallest sparse model; processors differ by a few.  These limits only fall."""


def functions_run(call) -> set[tuple[str, str]]:
    """Returns (file, name) of the package's functions that a call runs; nested ones count."""
    seen = set()

    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)) and code.co_name[0] != "<":
            seen.add((code.co_filename, code.co_name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return seen


def test_a_step_runs_few_files_and_functions():
    config = preset("pico").change(sparsity__block=16, run__twin=False, training__steps=10)
    [variant] = variants(config, 256)
    model, training = variant.model, variant.training
    state = abstract_state(model, training)
    state = state._replace(rest=stacks.with_layouts(model, state.rest))
    tokens = jax.ShapeDtypeStruct((training.batch, training.sequence), "int32")
    batch = Batch(tokens, tokens)
    rate = jax.ShapeDtypeStruct((), "float32")
    step = make_train_step(model, training)
    seen = functions_run(lambda: jax.make_jaxpr(step)(state, batch, rate))
    files = {file for file, _ in seen}
    assert len(files) <= MOST_FILES, "\n".join(sorted(files))
    assert len(seen) <= MOST_FUNCTIONS


def test_functions_that_run_are_found():
    found = {name for _, name in functions_run(lambda: preset("pico"))}
    assert "preset" in found and "make_train_step" not in found
