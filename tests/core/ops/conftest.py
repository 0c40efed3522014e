import contextlib
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture(autouse=True)
def environment(request):
    """Enters the context that an `implementation` of a suite needs to run here."""
    callspec = getattr(request.node, "callspec", None)
    implementation = callspec and callspec.params.get("implementation")
    with getattr(implementation, "environment", contextlib.nullcontext)():
        yield
