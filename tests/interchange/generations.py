"""Generations of transformers that read our exports, and the folders that hold them.

python tests/interchange/generations.py    installs those that are missing; `make optional` does

A folder is put in front of an environment that has torch and the newest transformers, so it holds
only the packages whose releases belong together.
"""

import dataclasses
import os
import pathlib
import subprocess
import sys

FOLDER = pathlib.Path(sys.prefix) / "generations"


@dataclasses.dataclass(frozen=True)
class Generation:
    """A release of transformers.

    Attributes:
      packages: what pip installs, without dependencies; empty for the installed release.
      refused: families that it does not load -> a part of the sentence with which it says so.
      eager: families whose default attention leaves out a part of the model.
    """

    packages: tuple[str, ...] = ()
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    eager: tuple[str, ...] = ()


GENERATIONS = {
    "4.46": Generation(
        ("transformers==4.46.3", "tokenizers==0.20.3", "huggingface_hub==0.36.2"),
        refused={
            **dict.fromkeys(
                ("qwen3", "qwen3_moe", "gemma3_text", "olmo2", "smollm3"), "does not recognize"
            ),
            # It applies the norm of a head's queries to all heads together.
            "phi": "Given normalized_shape",
            # It reads no partial_rotary_factor, and so counts too few factors of longrope.
            "phi3": "short_factor field must have length",
        },
    ),
    "4.57": Generation(
        ("transformers==4.57.6", "tokenizers==0.22.2", "huggingface_hub==0.36.2"),
        eager=("gemma2",),  # Its other kinds of attention have no soft-cap.
    ),
    "5.0": Generation(
        ("transformers==5.0.0", "tokenizers==0.22.2", "huggingface_hub==1.33.0"),
        eager=("gemma2",),
    ),
    "installed": Generation(),
}


def folder(name: str) -> pathlib.Path | None:
    """Returns the folder of a generation; None if it is not installed."""
    if not GENERATIONS[name].packages:
        return pathlib.Path()
    path = FOLDER / name
    return path if (path / ".complete").exists() else None


def read(name: str, exports: dict[str, str], prompts: list[str]) -> list[str]:
    """Returns the command that reads exports (see read_exports.py) with a generation."""
    script = pathlib.Path(__file__).with_name("read_exports.py")
    eager = ",".join(GENERATIONS[name].eager)
    folders = [f"{family}={path}" for family, path in exports.items()]
    return [sys.executable, str(script), "|".join(prompts), eager, *folders]


def install() -> None:
    """Installs each generation that is missing."""
    for name, generation in GENERATIONS.items():
        if folder(name) is None:
            pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
            target = ["--no-deps", "--upgrade", "--target", str(FOLDER / name)]
            subprocess.run([*pip, *target, *generation.packages], check=True)
            (FOLDER / name / ".complete").touch()
            print(f"installed transformers {name} in {os.path.relpath(FOLDER / name)}")


if __name__ == "__main__":
    install()
