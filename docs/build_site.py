"""Builds the documentation site: python docs/build_site.py FOLDER.

The pages are README.md, BUILD.md, CHANGELOG.md, docs/ and launch/. The API reference is read from
docstrings, and from the help of settings. The site needs no server and no network. mkdocs loads
this file as a hook, for the pages that are not in docs/.
"""

import ast
import logging
import posixpath
import re
import sys
from pathlib import Path

from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import sparse_dataflow
from sparse_dataflow.commands import flag_conflicts
from sparse_dataflow.commands.request import shown_default
from sparse_dataflow.core.config import settings
from sparse_dataflow.core.executors.compatibility import PARALLELISMS
from sparse_dataflow.files import folders
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs import compatibility
from sparse_dataflow.runs.run_config import RunConfig

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = sparse_dataflow.__name__
PAGES = {
    "README.md": "index.md",
    **{
        f"{name}.md": f"{name.lower()}.md"
        for name in ("BUILD", "CHANGELOG", "CONTRIBUTING", "SECURITY")
    },
}
ASSETS = (
    *("LICENSE", "CITATION.cff"),
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("notebooks/*.ipynb")),
)
REFERENCE = {
    "Layers": [
        "BlockSparseLinear",
        "sparsify",
        "densify",
        "evolve",
        "erk_densities",
        "cubic_density",
        "partition_specs",
        "register_linear",
        "layouts",
        "set_layouts",
    ],
    "Without flax nnx": [
        "draw_blocks",
        "cut_blocks",
        "join_blocks",
        "evolve_blocks",
    ],
    "Layouts and products": [
        "BlockLayout",
        "make_layout",
        "legal_densities",
        "block_sparse_matmul",
    ],
    "Training": ["preset", "RunConfig", "ModelConfig", "LinearSpec", "train"],
    "Models": [
        "Model",
        "Tokenizer",
        "init",
        "loss",
        "logits",
        "generate",
        "prune",
        "load",
        "save",
    ],
    "Counts and errors": ["flops_per_token", "parameter_count", "UserError"],
}
"""Page -> the public names on it."""
SETTINGS = "reference/settings.md"
IMPORTS = """import os
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import sparse_dataflow as sd"""
_LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
_CODE = re.compile(r"^```.*?^```", re.M | re.S)


def rooms() -> list[str]:
    """Folders of the package with an API page each, by name: the core's first."""
    package = ROOT / PACKAGE
    core = sorted(f"core.{path.parent.name}" for path in package.glob("core/*/__init__.py"))
    names = sorted(path.parent.name for path in package.glob("*/__init__.py"))
    return [*core, *(name for name in names if name != "core"), "experiments"]


def modules(room: str) -> list[str]:
    """Full names of a room and of every module in it."""
    base = ROOT if room == "experiments" else ROOT / PACKAGE
    names = []
    for path in sorted((base / room.replace(".", "/")).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(parts).removesuffix(".__init__"))
    return names


def site_path(path: str) -> str:
    """Where a file of the repository lies in the site; both are relative, with slashes."""
    return PAGES.get(path, path.removeprefix("docs/"))


def public_api() -> str:
    """The overview of the names of `sparse_dataflow`: the first lines of their docstrings."""
    text = ["# Public API", "", f"`import {PACKAGE} as sd` has these names.", ""]
    for page, names in REFERENCE.items():
        text += [f"## {page}", "", "| name | what it is |", "|---|---|"]
        for name in names:
            link = f"../{reference_path(page)}#sd.{name}"
            text.append(f"| [`sd.{name}`]({link}) | {summary(name)} |")
        text.append("")
    return "\n".join(text)


def summary(name: str) -> str:
    """The first sentence of a public name's docstring."""
    path = ROOT / PACKAGE / (sparse_dataflow._HOMES[name].replace(".", "/") + ".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    definition = next(node for node in tree.body if getattr(node, "name", "") == name)
    assert isinstance(definition, ast.ClassDef | ast.FunctionDef)
    docstring = ast.get_docstring(definition) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def reference_path(page: str) -> str:
    """Where a page of `REFERENCE` lies in the site."""
    return f"reference/{page.lower().replace(' ', '_')}.md"


def reference_page(page: str) -> str:
    """A page of public names, with signatures and examples."""
    text = [f"# {page}", "", "The examples have imported:", "", "```python", IMPORTS, "```", ""]
    for name in REFERENCE[page]:
        home = f"{PACKAGE}.{sparse_dataflow._HOMES[name]}.{name}"
        text += [f'<a id="sd.{name}"></a>', "", f"::: {home}", "    options:"]
        text += [f"      heading: sd.{name}", "      skip_local_inventory: true", ""]
    return "\n".join(text)


def settings_table(rows):
    """Returns a table of the page of settings: two settings in each row, and the reason."""
    lines = ["| setting | does not work with | legal |", "|---|---|---|"]
    for row in rows:
        legal = row.legal.removeprefix(compatibility.LEGAL).removeprefix("legal:").strip()
        for other in row.others:
            if other not in PARALLELISMS:
                option = "no " * row.option.needed + _code(row.option.words)
                lines.append(f"| {option} | {_code(other.words)}, {row.because} | {legal} |")
    return "\n".join(lines) + "\n"


def _code(words):
    """Marks words that are a setting alone as code."""
    return words if "`" in words or " " in words else f"`{words}`"


def settings_page() -> str:
    """The page of the settings of a `RunConfig`: default, help and legal values."""
    text = ["# Settings", "", "`--set PATH=VALUE`, or `config.change(PART__NAME=VALUE)`.", ""]
    text += ["| path | default | what it is | legal |", "|---|---|---|---|"]
    for path, s in settings.by_path(RunConfig).items():
        several = ("all", "none") if s.type == tuple[str, ...] else ()
        legal = s.legal[0] if s.legal else ", ".join((*several, *s.choices))
        text.append(f"| `{path}` | {shown_default(path, s)} | {s.help} | {legal} |")
    text += ["", "## Settings that ask something of another", ""]
    text += [settings_table(compatibility.TABLE)]
    text += ["Settings of a command line:", "", settings_table(flag_conflicts.ROWS)]
    return "\n".join(text) + "\n"


def room_page(room: str) -> str:
    """The page of a room's modules."""
    blocks = "\n".join(f"::: {name}\n" for name in modules(room))
    return f"# {room}\n\n{blocks}"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the API reference to the navigation."""
    public = [{page: reference_path(page)} for page in REFERENCE]
    public.append({"Settings": SETTINGS})
    reference = ["api/index.md", *public, {"Rooms": [f"api/{room}.md" for room in rooms()]}]
    config.nav = [*(config.nav or []), {"API": reference}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the repository outside docs/, and the API reference."""
    for path in (*PAGES, *(f"launch/{page.name}" for page in (ROOT / "launch").glob("*.md"))):
        content = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, site_path(path), content=content))
    for path in ASSETS:
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, "api/index.md", content=public_api()))
    for page in REFERENCE:
        content = reference_page(page)
        files.append(File.generated(config, reference_path(page), content=content))
    files.append(File.generated(config, SETTINGS, content=settings_page()))
    for room in rooms():
        files.append(File.generated(config, f"api/{room}.md", content=room_page(room)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links between files of the repository to their places in the site."""
    uri = page.file.src_uri
    if uri.startswith(("api/", "reference/")):
        return markdown
    if uri == "index.md":
        page.meta["hide"] = ["navigation"]
    source = {site: path for path, site in PAGES.items()}.get(uri, uri)
    if source == uri and not uri.startswith("launch/"):
        source = f"docs/{uri}"

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        return posixpath.relpath(site_path(target), posixpath.dirname(uri) or ".")

    blocks = iter([*_CODE.findall(markdown), ""])
    pieces = [_LINK.sub(moved, text) + next(blocks) for text in _CODE.split(markdown)]
    return "".join(pieces)


def main(folder: str) -> None:
    """Builds the site in `folder`, which is missing, empty or an earlier site.

    Raises:
      UserError: the folder holds other files.
      SystemExit: a link or a docstring is broken.
    """
    folders.claim(Path(folder), "docs/build_site.py", "FOLDER")
    warnings = Warnings()
    logging.getLogger("mkdocs").addHandler(warnings)
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(Path(folder).resolve()))
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    config.plugins.on_shutdown()
    if warnings.messages:
        sys.exit("\n".join(["error: the site has broken pages:", *warnings.messages]))
    print(f"{folder}/index.html")


class Warnings(logging.Handler):
    """Collects the warnings of a build."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the message of a warning."""
        self.messages.append(record.getMessage())


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
