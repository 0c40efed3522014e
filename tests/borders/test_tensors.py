"""A safetensors file that somebody else wrote is read or refused, soon."""

import json

import drawn
import numpy as np
import pytest
from drawn_inputs import DrawnInputs
from safetensors.numpy import save

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import tensors

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.int32),
    "c": np.ones((2, 2), np.float16),
}


def changed(draw):
    data = save(ARRAYS)
    size = int.from_bytes(data[:8], "little")
    header, content = json.loads(data[8 : 8 + size]), data[8 + size :]
    if draw.random() < 0.3:
        content = content[: draw.randint(0, len(content))]
    for _ in range(draw.choice([0, 1, 1, 2])):
        entry = header[draw.choice(sorted(ARRAYS))]
        entry[draw.choice(sorted(entry))] = draw.choice(
            [
                drawn.value(draw),
                "BF16",
                "F8_E4M3",
                "BOOL",
                "C64",
                [0, 24],
                [0, 2**62],
                [3, 1],
                [],
                [2],
            ]
        )
    text = json.dumps(header).encode()
    if draw.random() < 0.2:
        text = drawn.damaged(draw, text)
    length = draw.choice([len(text)] * 8 + [0, 7, 2**24, 2**24 + 1, 10**8, 2**63])
    data = length.to_bytes(8, "little") + text + content
    return drawn.damaged(draw, data) if draw.random() < 0.2 else data


def test_a_foreign_safetensors_file_is_read_or_refused(tmp_path):
    counts = DrawnInputs("tensors")
    for _ in counts:
        path = tmp_path / tensors.FILE
        path.write_bytes(changed(counts.draw))
        if counts.draw.random() < 0.1:
            index = {
                "weight_map": {"a": counts.draw.choice(["model.safetensors", "../x", "/dev/zero"])}
            }
            (tmp_path / tensors.INDEX).write_bytes(drawn.json_bytes(counts.draw, index))
        with counts.one(path.read_bytes()):
            reader = tensors.Tensors(tmp_path)
            for name, array in ARRAYS.items():
                read = reader.read_integers if array.dtype.kind == "i" else reader.read
                assert read(name, array.shape).shape == array.shape
        (tmp_path / tensors.INDEX).unlink(missing_ok=True)


def test_a_header_that_takes_long_is_refused(tmp_path):
    text = json.dumps(
        {f"{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(300_000)}
    )
    data = len(text).to_bytes(8, "little") + text.encode()
    (tmp_path / tensors.FILE).write_bytes(data)
    with pytest.raises(UserError, match="its header has"):
        tensors.Tensors(tmp_path)
