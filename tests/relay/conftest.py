import os
import pathlib
import sys

import pytest
from forks import Forks
from places import ROOT

sys.path.insert(0, str(pathlib.Path(__file__).parent))

IMPORTED = (
    "sparse_dataflow.cluster.rendezvous", "sparse_dataflow.relay.relay",
    "sparse_dataflow.relay.server_files",
)  # fmt: skip


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """Starts the scripts of this folder."""
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "JAX_PLATFORMS": "cpu",
    }
    forks = Forks(environment, tmp_path_factory.mktemp("forks"), IMPORTED)
    yield forks
    forks.close()
