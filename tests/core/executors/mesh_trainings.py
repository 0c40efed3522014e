"""Runs mesh_training.py on eight devices, and bounds its errors against a single device."""

from eight_devices import on_eight_devices


def mesh_training(*arguments):
    """Returns the JSON output of mesh_training.py."""
    return on_eight_devices("core/executors/mesh_training.py", *arguments)


def assert_like_single_device(results):
    """Bounds the errors of "compare"."""
    for text, errors in results.items():
        assert max(errors["losses"], errors["eval"], errors["norms"]) < 1e-5, (text, errors)
        assert errors["first moments"] < 1e-4, (text, errors)
        # Adam divides by the root of a square, which amplifies rounding errors.
        assert max(errors["moments"], errors["params"]) < 1e-3, (text, errors)


def assert_layouts_evolve_alike(results):
    """Bounds the errors of "evolve"."""
    [errors] = results.values()
    assert errors["layouts"] == 0
    assert errors["losses"] < 1e-5 and errors["params"] < 1e-2, errors
