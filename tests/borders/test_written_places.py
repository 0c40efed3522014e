"""What writes for the caller knows an address when it sees one, and makes no folder `s3:`."""

import inspect

import jax
import numpy as np
import pytest

import sparse_dataflow as sd
from sparse_dataflow.data.tokenizer import byte_tokenizer

PLACES = {"folder", "out", "path", "to", "place", "file"}
"""Names of parameters that are a place on a disk, or read as one."""
READERS = {"load", "Tokenizer.load", "ModelConfig.selected"}
WRITERS = {
    "save": lambda place: sd.save(model(), place, "dense"),
    "prune": lambda place: sd.prune(model(), [np.zeros((2, 16), np.int32)], out=place),
    "Tokenizer.save": lambda place: byte_tokenizer(300).save(place),
}


def model():
    config = sd.preset("pico").change(sparsity__block=16, model__num_layers=1)
    return sd.init(config.dense(), jax.random.key(0))


def public():
    """Yields (name, function) of what users call; of classes the methods."""
    for name in sd.__all__:
        value = getattr(sd, name)
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value) and value.__module__.startswith("sparse_dataflow"):
            for method, function in inspect.getmembers(value, callable):
                if not method.startswith("_") and hasattr(function, "__annotations__"):
                    yield f"{name}.{method}", function


def test_every_function_with_a_place_is_known():
    with_place = {
        name for name, function in public() if PLACES & {*inspect.signature(function).parameters}
    }
    assert with_place - READERS == {*WRITERS}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("place", ["s3://bucket/model", "gs:/bucket/model"])
def test_an_address_is_refused_and_no_folder_is_made(name, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(sd.UserError, match=r"bucket/model .*legal"):
        WRITERS[name](place)
    assert not list(tmp_path.iterdir())
