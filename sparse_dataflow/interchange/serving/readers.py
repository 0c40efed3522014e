"""Readers that are written with an export: programs of one file, which run without this package."""

from pathlib import Path

SHARED_IMPORT = "from sparse_dataflow.interchange.serving.prompts import arguments\n"
"""Line of a reader in whose place the text of `prompts` is written."""


def write_reader(folder: Path, name: str) -> None:
    """Writes `run_in_jax.py` or `run_in_torch.py` into a folder."""
    sources = (Path(__file__).with_name(file) for file in (name, "prompts.py"))
    reader, shared = (path.read_text(encoding="utf-8") for path in sources)
    before, line, after = reader.partition(SHARED_IMPORT)
    assert line, f"{name} does not import the prompts"
    text = f"{before}\n{shared[shared.index('class Text') :]}\n{after}"
    (folder / name).write_text(text, encoding="utf-8")
