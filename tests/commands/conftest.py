import pytest

from sparse_dataflow.commands import run_report


@pytest.fixture(scope="module")
def reports_without_continuations():
    """Leaves the continuations out of reports; tests/experiments has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_report, "_continuations", lambda *_: ([], {}))
        yield
