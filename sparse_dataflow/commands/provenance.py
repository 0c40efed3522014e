"""What made a run: the command or the Python call, the code and the host."""

import importlib.metadata
import socket
import subprocess
from pathlib import Path
from typing import Any

from sparse_dataflow.core.config import presets, settings
from sparse_dataflow.core.config.run import RunConfig
from sparse_dataflow.files import json_files

_SECONDS = 5.0
_WHERE_IT_RAN = ("run.out", "run.mirror", "run.scale")


def python_call(config: RunConfig, texts: bool = False) -> str:
    """Returns the call of `sd.train` that trains a config, with its settings as literals.

    Args:
      config: as `sd.train` got it.
      texts: whether documents were passed, which the call names `texts`.
    """
    scale, dtype = config.run.scale, config.model.compute_dtype
    base = presets.preset(scale, compute_dtype=dtype)
    before, now = _values(base), _values(config)
    changed = {path: value for path, value in now.items() if value != before[path]}
    words = [f"{path.replace('.', '__', 1)}={value!r}" for path, value in changed.items()]
    of_dtype = f', compute_dtype="{dtype}"' if dtype != "float32" else ""
    call = f'sd.preset("{scale}"{of_dtype})'
    call += f".change({', '.join(words)})" if words else ""
    return f"sd.train({call}{', texts=texts' if texts else ''})"


def _values(config: RunConfig) -> dict[str, Any]:
    values = {}
    for path in settings.by_path(RunConfig):
        member, _, name = path.partition(".")
        if path not in _WHERE_IT_RAN:
            values[path] = getattr(getattr(config, member), name)
    return values


def code() -> dict[str, Any]:
    """Returns {"commit", "dirty"} of this package: a clone's git commit and whether tracked files
    differ from it, or the commit that pip installed; {} where neither is known."""
    root = Path(__file__).parents[2]
    if (root / ".git").exists():
        try:
            commit = _git(root, "rev-parse", "HEAD")
            changes = _git(root, "status", "--porcelain", "--untracked-files=no")
        except (OSError, subprocess.SubprocessError):
            return {}
        return {"commit": commit, "dirty": bool(changes)}
    try:
        url = importlib.metadata.distribution("sparse_dataflow").read_text("direct_url.json")
        commit = json_files.parse(url or "{}").get("vcs_info", {}).get("commit_id")
    except (importlib.metadata.PackageNotFoundError, ValueError, AttributeError, OSError):
        return {}
    return {"commit": str(commit), "dirty": False} if commit else {}


def _git(root, *arguments):
    done = subprocess.run(
        ["git", "--no-optional-locks", "-C", str(root), *arguments],
        capture_output=True, text=True, check=True, timeout=_SECONDS, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.stdout.strip()


def host() -> str:
    """Returns the name of this host."""
    return socket.gethostname()
