"""Names of code in backticks, in pages and docstrings, exist."""

import ast
import functools
import re

import pytest
from places import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MODULES = sorted(
    path
    for folder in ("sparse_dataflow", "experiments", "tests", "launch", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
DOTTED = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(.*?\))?`")
WORD = re.compile(r"`([A-Za-z_]\w*)(?:\(.*?\))?`")
FILE = re.compile(r"`([\w./-]+/[\w.-]*\.(?:py|md|sh|toml|cfg|txt))`")
FILES = ("json", "jsonl", "html", "model", "max", "limit_in_bytes", "array_record")
EXAMPLES = ("mine.py",)
"""Files that a page tells the reader to write."""
PACKAGES = ("peft", "lm_eval")
"""Packages of others with the name of one of our modules."""
HISTORY = ("CHANGELOG.md",)
"""Pages that name code of earlier releases."""


@functools.cache
def definitions():
    """{name of a module or class: names defined in it, [] where they cannot be known}."""
    found: dict[str, set[str]] = {}

    def add(name, names):
        found.setdefault(name, set()).update(names)

    for path in MODULES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        names = {n for node in tree.body for n in defined(node)}
        for start in range(len(parts)):
            add(".".join(parts[start:]), names)
            if start < len(parts) - 1:
                add(".".join(parts[start:-1]), {parts[-1]})
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                inside = {n for child in ast.walk(node) for n in defined(child)}
                bases = {b.id for b in node.bases if isinstance(b, ast.Name)}
                add(node.name, inside | {f"<{base}>" for base in bases})
    return found


def defined(node):
    """Names that a statement defines, attributes of `self` included."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((a.asname or a.name).partition(".")[0] for a in node.names)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for leaf in ast.walk(target):
                if isinstance(leaf, ast.Name | ast.Attribute):
                    yield leaf.id if isinstance(leaf, ast.Name) else leaf.attr
    elif isinstance(node, ast.If | ast.Try):
        for child in ast.iter_child_nodes(node):
            yield from defined(child)


def has(owner, name):
    """Whether a class or module of the project defines a name, or a base that is not known may."""
    names = definitions()[owner]
    if name in names or f"{owner}.{name}" in definitions():
        return True
    bases = [b[1:-1] for b in names if b.startswith("<")]
    return any(base not in definitions() or has(base, name) for base in bases)


@functools.cache
def parameters():
    """Names of the parameters of all functions; in a text such a name may stand for a value."""
    return {
        argument.arg
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.arguments)
        for argument in (*node.posonlyargs, *node.args, *node.kwonlyargs)
    }


def missing(dotted):
    """Whether a dotted name begins with a name of the project and ends in one that is not."""
    section, _, field = dotted.partition(".")
    if field in FILES:
        return False
    if section == "config" and field.partition(".")[0] in settings_by_section():
        return False  # A field of a `RunConfig`.
    if section in settings_by_section() and "." not in field:
        return field not in settings_by_section()[section] and section not in definitions()
    parts = dotted.removeprefix("sparse_dataflow.").split(".")
    if parts[-1] == "py":
        written = dotted in EXAMPLES or section.isupper() or section.startswith("NAME_")
        return not (
            written or (ROOT / dotted).exists() or any(path.name == dotted for path in MODULES)
        )
    for end in range(len(parts) - 1, 0, -1):
        owner = ".".join(parts[:end])
        if owner in definitions():
            return not has(owner, parts[end]) and owner not in {*parameters(), *PACKAGES}
    return False


@functools.cache
def settings_by_section():
    import sparse_dataflow as sd

    found = {}
    for name in ("model", "training", "sparsity", "evolution", "parallel", "data", "run"):
        found[name] = set(dir(getattr(sd.preset("pico"), name)))
    return found


def docstrings(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                yield node.value.value


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_of_a_page_exist(path):
    if path.name in HISTORY:
        return
    text = path.read_text(encoding="utf-8")
    assert [name for name in DOTTED.findall(text) if missing(name)] == []
    files = [name for name in FILE.findall(text)]
    assert [f for f in files if not file_exists(f)] == []


def file_exists(name):
    folders = ("", "sparse_dataflow", "sparse_dataflow/core", "docs", "tests", "experiments")
    return any((ROOT / folder / name).exists() for folder in folders)


BARE = re.compile(r"`([\w-]+\.py)`")
NAMED_IN = re.compile(r"`([A-Za-z_]\w*)`(?: of| in) `([\w/.-]+\.py)`")
PLACE = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`")
DEVELOPERS = ("BUILD.md", "docs/developing.md")
MADE = ("build/docs", "runs/")
"""Places that a command makes."""


def folders_of(text):
    """Folders of the package that a text names, itself or by a file in them, the last one last."""
    places = [name for name in PLACE.findall(text) if file_exists(name)]
    return [name.rpartition("/")[0] for name in places]


def file_of(name, text):
    """The only file that a bare name means after a text: in the folder that was named last, or
    alone in the project; None where there is no such file."""
    for folder in reversed(folders_of(text)[-1:]):
        beside = [path for path in MODULES if path.match(f"{folder}/{name}")]
        if len(beside) == 1:
            return beside[0]
        if "\n|" in text:  # A table below the sentence that names its folder.
            return None
    alone = [path for path in MODULES if path.name == name]
    return alone[0] if len(alone) == 1 else None


def lost_pointers(page):
    """Names of files, folders and what is in them that a page for developers does not lead to."""
    lost = []
    for section in re.split(r"^#+ .*$", page, flags=re.M):
        for match in BARE.finditer(section):
            before = section[: match.start()]
            row = before.rpartition("\n")[2]
            # A row that names a folder means it; else the section's prose does.
            context = row if folders_of(row) else before
            if file_of(match[1], context) is None and match[1] not in (*EXAMPLES, "setup.py"):
                lost.append(match[1])
    for line in page.splitlines():
        rooms = ["", *(f"{room}/" for room in WORD.findall(line))]
        for place in PLACE.findall(line):
            names = [f"{room}{place}{ending}" for room in rooms for ending in ("", ".py")]
            if not place.startswith(MADE) and not any(map(file_exists, names)):
                lost.append(place)
    for name, file in NAMED_IN.findall(page):
        paths = [path for path in (*MODULES, ROOT / file) if path.match(file) and path.exists()]
        if not any(re.search(rf"\b{name}\b", path.read_text(encoding="utf-8")) for path in paths):
            lost.append(f"{name} of {file}")
    return lost


@pytest.mark.parametrize("name", DEVELOPERS)
def test_a_page_for_developers_leads_to_its_files(name):
    assert lost_pointers((ROOT / name).read_text(encoding="utf-8")) == []


RELAY = "`relay/relay.py` walks over the layers. The other files:\n\n| file |\n|---|\n| `{}` |\n"


@pytest.mark.parametrize(
    ("page", "lost"),
    [
        (RELAY.format("relay_programs.py"), []),
        (RELAY.format("programs.py"), ["programs.py"]),
        (RELAY.format("executor.py"), ["executor.py"]),
        ("| a published run | a CSV in `planner/published` |", ["planner/published"]),
        ("| a published run | a CSV in `experiments/planning/published` |", []),
        (
            "| a family | `FAMILIES` of `core/config/model.py` |",
            ["FAMILIES of core/config/model.py"],
        ),
        ("| a family | `FAMILIES` of `runs/families.py` |", []),
        ("| a layer | in `core/training/cost.py` and `memory.py` |", ["memory.py"]),
        ("# One\n`relay/relay.py`\n# Two\n`relay_programs.py`", []),
    ],
)
def test_pointers_are_resolved_from_their_page_and_table(page, lost):
    assert lost_pointers(page) == lost


@pytest.mark.parametrize("folder", ["sparse_dataflow", "experiments"])
def test_names_of_docstrings_exist(folder):
    wrong = []
    for path in MODULES:
        if path.relative_to(ROOT).parts[0] == folder:
            for text in docstrings(path):
                wrong += [(str(path), n) for n in DOTTED.findall(text) if missing(n)]
                wrong += [(str(path), n) for n in FILE.findall(text) if not file_exists(n)]
    assert wrong == []


@pytest.mark.parametrize("name", DEVELOPERS)
def test_words_of_pages_for_developers_are_in_the_code(name):
    page = re.sub(r"^```.*?^```", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.M | re.S)
    files = [*MODULES, ROOT / "Makefile", ROOT / "setup.cfg", ROOT / "docs" / "build_site.py"]
    code = " ".join(path.read_text(encoding="utf-8") for path in files)
    words = set(re.findall(r"[A-Za-z_]\w*", code))
    assert [word for word in WORD.findall(page) if word not in words] == []


def test_files_of_tests_find_the_checkout_through_places():
    # A count of folders is wrong after a move, and then finds tests/ in the place of the checkout.
    counted = re.compile(r"^(?!.*sys\.path).*Path\(__file__\)\.parent(?:s\[|\.parent)", re.M)
    scripts = {"mutation", "real", "storm"}  # Run by path, without pytest's folders.
    paths = [p for p in (ROOT / "tests").rglob("*.py") if p.parent.name not in scripts]
    found = {str(path) for path in paths if counted.search(path.read_text(encoding="utf-8"))}
    assert not found
