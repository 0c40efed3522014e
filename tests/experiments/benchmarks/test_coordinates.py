"""What the coordinate check trains by default."""

from experiments import coordinate_check
from experiments.benchmarks.benchmark import named_model
from experiments.studies.activation_changes import with_width
from sparse_dataflow.runs.run_config import preset


def test_every_model_has_layouts_and_heads_of_one_width():
    scale, block = (coordinate_check.DEFAULTS[name] for name in ("scale", "block"))
    size, options = preset(scale).model, coordinate_check.Options()
    for width in options.widths:
        for density in options.densities:
            wide = with_width(named_model(scale, density, block), width)
            assert wide.d_model // wide.num_heads == size.d_model // size.num_heads
