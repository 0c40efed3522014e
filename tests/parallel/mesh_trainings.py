"""Runs mesh_training.py on eight devices, and says how near to one device its results must be."""

from eight_devices import on_eight_devices


def mesh_training(*arguments):
    """What mesh_training.py prints."""
    return on_eight_devices("parallel/mesh_training.py", *arguments)


def assert_like_one_device(found):
    """Of what its "compare" prints."""
    for text, errors in found.items():
        assert max(errors["losses"], errors["eval"], errors["norms"]) < 1e-5, (text, errors)
        assert errors["first moments"] < 1e-4, (text, errors)
        # Adam divides by the root of a square, and so enlarges what rounding leaves.
        assert max(errors["moments"], errors["params"]) < 1e-3, (text, errors)


def assert_layouts_evolve_alike(found):
    """Of what its "evolve" prints."""
    [errors] = found.values()
    assert errors["layouts"] == 0
    assert errors["losses"] < 1e-5 and errors["params"] < 1e-2, errors
