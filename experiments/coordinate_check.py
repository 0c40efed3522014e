"""Does the size of activations stay the same over width and density? (arXiv 2405.15743, figure 1)

Trains a few steps at every width and density, under the standard parametrization and under SuPar,
and prints with which power of width and density the change of each activation grows: 0 is flat, and
then one learning rate serves every model.

    python -m experiments.coordinate_check                          one core: seven minutes
    python -m experiments.coordinate_check --widths=256,512,1024 --block=32

Leaves OUT/coordinate_check.json and OUT/coordinate_check.png.
"""

from experiments import flags
from experiments.command_line import AT_LEAST_ONE, Flag, Group

CHECK = Group(
    "Check",
    "what is compared",
    (
        Flag("widths", "text", "128,256,512", "Values of d_model."),
        Flag("densities", "text", "1,0.25,0.125", "Fractions of blocks stored."),
        Flag("steps", "integer", 5, "Steps of each training.", legal=AT_LEAST_ONE),
        Flag("out", "text", "runs/coordinate_check", "Folder to make."),
    ),
)
GROUPS = (
    *flags.with_defaults(
        flags.without(
            *(
                "minutes",
                "steps",
                "twin",
                "density",
                "parametrization",
                "warmup",
                "final_rate",
                "rank",
                "hadamard",
            ),
            groups=(flags.MODEL, flags.SPARSITY, flags.TRAINING, flags.DATA),
        ),
        # Heads keep their width, and the narrowest model has a layout at the lowest density.
        scale="pico",
        block=8,
    ),
    CHECK,
)


def main(values):
    """Trains all, prints the exponents and draws the figure."""
    import json
    from pathlib import Path

    from experiments import coordinates, measurement, study
    from sparse_dataflow.files import folders

    out = Path(values.out)
    folders.refuse_foreign(out, "coordinate_check")
    begun = study.begin(values, GROUPS)
    found = coordinates.measure(values, begun)
    print(coordinates.table(found))
    result = {**measurement.provenance(begun.chip.name), "changes": found}
    folders.claim(out, "coordinate_check")
    (out / "coordinate_check.json").write_text(json.dumps(result, indent=1) + "\n")
    coordinates.draw(found, out / "coordinate_check.png")
    print(f"figure: {out / 'coordinate_check.png'}")


if __name__ == "__main__":
    flags.run(main, __doc__, GROUPS)
