"""Every command, flag, setting, link and example in the documentation is legal and short."""

import html.parser
import importlib
import importlib.util
import itertools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
from documented_commands import (
    NOT_RUN,
    PAGES,
    ROOT,
    RUN,
    TARGETS_OF_CI,
    docstring_commands,
    fenced_commands,
    inline_commands,
    split_commands,
)
from planned_commands import spelled_out

import sparse_dataflow
from sparse_dataflow.commands import command_line
from sparse_dataflow.commands.request import NAMED, Request
from sparse_dataflow.core.config import settings
from sparse_dataflow.files import console
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.run_config import RunConfig, preset

TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
# Commands of clusters and clouds must have a comment "# needs ...".
CLUSTER_COMMANDS = ("docker", "sbatch", "scancel", "squeue", "kubectl", "gcloud")
# Legal commands that are not part of this project.
FOREIGN = (
    *("git clone", "cd ", "python mine.py", "python -m build", "python -m venv", "lm_eval "),
    "python -m sparse_dataflow.commands.lm_eval",
    *("pip install ", ". .venv/bin/activate"),
)
SETTINGS = settings.by_path(RunConfig)
EXTRAS = set(re.findall(r"^([a-z]+) =$", (ROOT / "setup.cfg").read_text(), re.M))
CONFIGS = "|".join(sorted({path.partition(".")[0] for path in SETTINGS}))
README_WORDS = 900
LINE = 100
GUIDE_LINES = 150
GUIDE = ROOT / "docs" / "guide"
CELL_WORDS = 25
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
RUN_CONFIG = preset("pico")


def problem(line):
    """Returns why a line of commands is illegal; "" if it is legal."""
    commands, comment = split_commands(line)
    return next((text for c in commands if (text := command_problem(c, comment))), "")


def command_problem(command, comment):
    if command.startswith(FOREIGN):
        return ""
    words = shlex.split(command)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]
    words = spelled_out(words)
    if words[0] in CLUSTER_COMMANDS:
        return "" if "needs" in comment else "add a comment with what it needs"
    if words[0] == "make":
        named = [word for word in words[1:] if "=" not in word]
        return "" if set(named) <= set(TARGETS) else f"no such target: {named}"
    if command == ". .venv/bin/activate":
        return ""
    if words[:2] == ["pip", "install"]:
        return "" if set(re.findall(r"\[([a-z,]+)\]", command)) <= EXTRAS else "no such extra"
    if words[0] == console.SCRIPT:
        if words[1] not in console.EVERYDAY:
            return f"no such command: {words[1]}"
        return experiment_problem(f"experiments.{console.EVERYDAY[words[1]]}", words[2:])
    if words[:2] == ["python", "-m"] and words[2].startswith("experiments."):
        return experiment_problem(words[2], words[3:])
    if words[0] in ("python", "sh"):
        # What an export has beside its weights is called DIR/NAME.
        file = words[1].replace("DIR/", "sparse_dataflow/interchange/serving/")
        if not (ROOT / file).exists():
            return f"no such file: {words[1]}"
        if words[1] == "launch/local.py":
            rest = words[words.index("-m") :]
            return command_problem(shlex.join(["python", *rest]), comment)
        return ""
    return "" if (ROOT / words[0]).exists() else f"no such program: {words[0]}"


def experiment(name):
    """Returns an experiment's module; None if its flags are not settings."""
    spec = importlib.util.find_spec(name)
    if spec and "command_line.run_main(" not in pathlib.Path(spec.origin).read_text(
        encoding="utf-8"
    ):
        return None
    return importlib.import_module(name)


def experiment_problem(name, arguments):
    module = experiment(name)
    left_out = ("--help", "--resume=")
    flags = [a for a in arguments if a != "..." and not a.startswith(left_out)]
    flags = [a for a in flags if a not in ("--resume", "--run")]  # Alone, the newest run.
    try:
        if module is None:
            sets = [b for a, b in itertools.pairwise(flags) if a == "--set"]
            settings.changed(RUN_CONFIG, {p: v for p, _, v in (t.partition("=") for t in sets)})
            return ""
        shared, options = getattr(module, "SHARED", ()), getattr(module, "Options", None)
        for argument in command_line.arguments([name, *flags], shared, options):
            if isinstance(argument, Request) and not argument.changes.get("run.init_from"):
                argument.config()
    except UserError as error:
        return str(error)
    return ""


def runners(line):
    """Returns the modules, scripts and targets that a line runs, the keys of RUN; none if it needs
    special hardware."""
    commands, comment = split_commands(line)
    if "needs" in comment:
        return []
    keys = []
    for command in commands:
        words = [w for w in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=.*", w)]
        if words[0] == "make":
            named = [f"make {word}" for word in words[1:]]
            keys += [n for n in named if n[5:] not in (*TARGETS_OF_CI, *NOT_RUN)]
        elif words[0] in ("python", "sh"):
            script = [word for word in words[1:] if not word.startswith("-")][:1]
            modules = [after for word, after in itertools.pairwise(words) if word == "-m"]
            keys += dict.fromkeys([*script, *modules])
    return keys


@each_page
def test_every_command_is_legal_and_run_by_a_test_or_has_its_needs(page):
    lines = [*fenced_commands(page), *inline_commands(page)]
    wrong = {line: reason for line in lines if (reason := problem(line))}
    assert not wrong
    assert {line: run for line in lines for run in runners(line) if run not in RUN} == {}


def test_pages_have_commands_of_a_wheel_and_name_those_of_a_clone_once():
    text = {page: page.read_text(encoding="utf-8") for page in PAGES}
    modules = [page for page in PAGES for _ in text[page].split("python -m experiments")[1:]]
    assert modules == [ROOT / "docs/guide/install.md"]


def test_commands_in_the_experiments_docstrings_are_legal():
    lines = [line for _, line in docstring_commands()]
    assert len(lines) > 20
    assert {line: reason for line in lines if (reason := problem(line))} == {}
    assert {line: run for line in lines for run in runners(line) if run not in RUN} == {}


@pytest.mark.parametrize("name", RUN)
def test_the_test_that_runs_a_command_exists(name):
    file, _, function = RUN[name].partition("::")
    source = (ROOT / file).read_text()
    assert re.search(rf"^def {function}", source, re.M), RUN[name]
    if not name.startswith("make "):
        assert pathlib.PurePath(name.removeprefix("experiments.")).stem in file + source


@pytest.mark.parametrize("target", sorted({*TARGETS} - {"env"}))
def test_the_recipe_of_a_target_names_existing_files(target):
    """The names of files and folders come from a dry run."""
    done = subprocess.run(
        ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    named = re.findall(r"(?<![\w./-])((?:tests|launch|docs|experiments)/[\w./-]+)", done.stdout)
    assert [path for path in named if not (ROOT / path).exists()] == []
    for module in re.findall(r"-m (experiments\.\w+)", done.stdout):
        assert importlib.util.find_spec(module)


def test_illegal_commands_are_found():
    for line in (
        "python -m experiments.gpt13b_sparse --densty=0.5",
        "python -m experiments.gpt13b_sparse --density=7",
        "python -m experiments.gpt13b_sparse --set trainig.warmup=0.05",
        "python -m experiments.gpt13b_sparse --set training.warmup=2",
        "python -m experiments.gpt13b_sparse --steps=3 --minutes=2",
        "make everything",
        "python launch/nowhere.py",
        "sh launch/nowhere.sh | cat",
        "docker build .",
    ):
        assert problem(line), line
    with pytest.raises(ModuleNotFoundError):
        problem("python -m experiments.nothing")
    assert sum(1 for page in PAGES for _ in fenced_commands(page)) > 15
    assert runners("python mine.py --pattern=x") == ["mine.py"]
    assert runners("A=1 make bench && make test") == ["make bench"]
    assert runners("python launch/local.py --processes=2 -m experiments.x") == [
        "launch/local.py", "experiments.x"
    ]  # fmt: skip
    assert runners("python -m experiments.x   # needs a TPU") == []
    assert {*NOT_RUN} <= {*TARGETS} and TARGETS_OF_CI


def test_every_fenced_block_is_checked():
    for page in PAGES:
        opened = re.findall(r"^ *```(\w*)$", page.read_text(encoding="utf-8"), re.M)
        assert set(opened[::2]) <= {"", "python"} and set(opened[1::2]) <= {""}, page


def anchors(page):
    """Returns the anchors of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@each_page
def test_every_link_resolves(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text("utf-8")):
        if "://" not in target:
            path = page.parent / target if target else page
            assert path.exists(), target
            assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


def legal_flags():
    """Returns the names of all flags: shared ones, those of experiments, of launchers and of the
    readers that are written beside an export."""
    names = {*NAMED, "set", "help", "flagfile"}
    for path in (ROOT / "experiments").glob("[a-z]*.py"):
        if "__main__" not in path.read_text(encoding="utf-8"):
            continue
        module = experiment(f"experiments.{path.stem}")
        if module is None:
            names |= set(re.findall(r"Flag\(\s*\"(\w+)\"", path.read_text(encoding="utf-8")))
        elif options := getattr(module, "Options", None):
            names |= {s.name for s in settings.settings(options)}
    readers = (ROOT / "sparse_dataflow/interchange/serving").glob("run_in_*.py")
    for path in [*(ROOT / "launch").rglob("*"), *readers]:
        if path.is_file() and path.suffix != ".pyc":
            names |= set(re.findall(r"--([a-z][\w-]*)", path.read_text(encoding="utf-8")))
    return names


@each_page
def test_every_flag_and_setting_is_legal(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
    named = {name for span in spans for name in re.findall(r"(?:^| )--([a-z]\w*)", span)}
    assert named - legal_flags() == set()
    for span in spans:
        for path, value in re.findall(rf"(?:^| )((?:{CONFIGS})\.[a-z_]+)(?:=(\S+))?(?= |$)", span):
            if not path.endswith(".json"):
                assert path in SETTINGS, span
                if value and not value.isupper():
                    settings.parsed(SETTINGS[path], value)


def test_each_guide_page_is_linked_from_another_or_the_readme():
    pages, linked = sorted(GUIDE.glob("*.md")), set()
    for page in [ROOT / "README.md", *pages]:
        targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        linked |= {(page.parent / target).resolve() for target in targets} - {page}
    assert [page.name for page in pages if page not in linked] == []


def test_the_changelog_is_short():
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= GUIDE_LINES


def test_every_measured_claim_names_its_command_and_a_kept_file():
    lines = (ROOT / "docs/evidence/claims.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if "| measured" in line]
    for row in rows:
        assert re.search("`(sparse-dataflow|make) ", row), row
        names = re.findall(r"`([\w.-]+\.json|task_table_3m)`", row)
        assert all((ROOT / "experiments/results" / name).exists() for name in names), row
        assert names or "no kept file" in row or "`make test" in row, row
    assert len(rows) > 10


@pytest.mark.parametrize("name, words", [("cluster", 400), ("data", 800), ("own_model", 800)])
def test_the_page_of_what_a_reader_has_is_short(name, words):
    text = (GUIDE / f"{name}.md").read_text(encoding="utf-8")
    assert len(text.split()) <= words


@pytest.mark.parametrize("page", sorted(GUIDE.glob("*.md")), ids=lambda page: page.name)
def test_a_guide_is_short_and_starts_with_a_command(page):
    """Within 25 lines a reader finds a command, an example or a table of what to take."""
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= GUIDE_LINES
    assert any(line.startswith(("```", "|")) for line in lines[:25])


def evidence(page, anchor):
    """Returns the text of a page from a heading to the next one of its level."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^(#+) (.*)$", text, re.M):
        if re.sub(r"[^\w\- ]", "", match[2]).lower().replace(" ", "-") == anchor:
            return re.split(rf"^#{{1,{len(match[1])}}} ", text[match.end() :], flags=re.M)[0]
    raise AssertionError(f"{page}: {anchor}")


@pytest.mark.parametrize(("name", "least"), [("choose", 15), ("pruning_shapes", 15)])
def test_figures_of_the_choices_stand_in_the_evidence(name, least):
    """Numbers with a point, % or x of a list item or row are in a section that it links to."""
    page = GUIDE / f"{name}.md"
    items = re.split(r"^(?=\d\. |\|)|\n\n", page.read_text(encoding="utf-8"), flags=re.M)
    compared = 0
    for item in items:
        links = re.findall(r"\]\((\.\./evidence/\w+\.md)#([^)]+)\)", item)
        figures = re.findall(
            r"(?<![\w.-])\d+\.\d+|(?<![\w.-])\d+(?=%)", re.sub(r"`[^`]*`", "", item)
        )
        texts = " ".join(evidence(page.parent / target, anchor) for target, anchor in links)
        if links:
            assert [figure for figure in figures if figure not in texts] == [], item
            compared += len(figures)
    assert compared >= least


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= README_WORDS


@each_page
def test_lines_and_cells_are_short(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > LINE and not line.startswith("|")] == []
    cells = [cell for line in lines if line.startswith("|") for cell in line.split(" | ")]
    words = {cell: len(re.sub(r"`[^`]*`", "code", cell).split()) for cell in cells}
    assert [cell for cell, count in words.items() if count > CELL_WORDS] == []


@each_page
def test_a_list_follows_an_empty_line(page):
    """Without it mkdocs renders the list as part of the paragraph."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    item = re.compile(r"(- |\d+\. |  )")
    wrong = [
        second
        for first, second in itertools.pairwise(text.splitlines())
        if re.match(r"(- |\d+\. )", second) and first and not item.match(first)
    ]
    assert wrong == []


def test_the_readme_example_runs():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"## A sparse layer\n\n```python\n(.*?)^```", text, re.M | re.S)[1]
    names = {}
    exec(block, names)
    assert names["y"].shape == (2048, 8192)
    assert names["losses"][-1] < names["losses"][0]


@pytest.mark.slow
def test_the_steps_of_getting_started_run_as_printed(tmp_path):
    page = GUIDE / "start.md"
    text = page.read_text(encoding="utf-8")
    programs = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": programs, "PYTHONPATH": str(ROOT)}
    outputs = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S):
        command = [sys.executable, "-c", block] if language else ["sh", "-ec", block]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1500
        )
        assert done.returncode == 0, f"{block}\n{done.stderr[-3000:]}"
        outputs.append(done.stdout + done.stderr)
    first, resumed, _, evaluated, pruned, counted = outputs
    assert "report: runs/first/report.html" in first and "held-out bits per byte" in first
    assert "resumes after step 1000 of 1000" in resumed
    assert "cloze" in evaluated and (tmp_path / "runs" / "first" / "report.html").exists()
    assert "report: runs/pruned/report.html" in pruned
    # An eighth of two weights of 256 x 1024, biases, and the eight numbers of each layout.
    assert int(counted.split("\n")[0]) == 2 * 256 * 1024 // 8 + 1024 + 256 + 2 * 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", ["block_sparse_linear", "layers", "changing_layers", "saving_layers", "libraries"]
)
def test_python_in_a_page_of_layers_runs_alone(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    text = (GUIDE / f"{page}.md").read_text(encoding="utf-8")
    for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
        exec(block, names)
    made = {"block_sparse_linear": "layout.png", "saving_layers": "saved/layouts.npz"}
    assert (tmp_path / made.get(page, ".")).exists()
    assert page != "layers" or names["sparse"].layers[0].layout.density == 0.125


def test_python_in_the_pages_compiles():
    blocks = [
        block
        for page in PAGES
        for block in re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(), re.M | re.S)
    ]
    assert blocks
    for block in blocks:
        compile(re.sub(r"^  ", "", block, flags=re.M), "page", "exec")


class Links(html.parser.HTMLParser):
    """Link targets and anchors of a page, and URLs of resources that it loads."""

    def __init__(self, text):
        super().__init__()
        self.targets, self.anchors, self.loaded = [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors |= {attributes.get("id"), attributes.get("name")}
        target = attributes.get("href") or attributes.get("src")
        if target:
            self.targets.append(target)
            if tag != "a":
                self.loaded.append(target)


def build_site(folder):
    """Builds the site in `folder`; returns the completed process."""
    pytest.importorskip("mkdocstrings")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, str(ROOT / "docs" / "build_site.py"), str(folder)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "docs"
    done = build_site(folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_is_whole(site):
    """Every link resolves, no page loads resources from the network, search has every page."""
    pages = {
        path: Links(path.read_text(encoding="utf-8"))
        for path in site.rglob("*.html")
        if path.name != "404.html"
    }
    assert len(pages) > 30
    for path, links in pages.items():
        assert [target for target in links.loaded if "://" in target] == []
        for target in links.targets:
            address, _, anchor = target.partition("#")
            if "://" in address or address.startswith(("mailto:", "data:")):
                continue
            linked = (path.parent / address).resolve() if address else path
            linked = linked / "index.html" if linked.is_dir() else linked
            assert linked.exists(), f"{path.name}: {target}"
            if anchor and linked in pages:
                assert anchor in pages[linked].anchors, f"{path.name}: {target}"
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    indexed = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {page.relative_to(site).as_posix() for page in pages} <= indexed


@pytest.mark.slow
def test_the_reference_has_the_public_names_and_every_module(site):
    page = (site / "api" / "index.html").read_text(encoding="utf-8")
    pages = [path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html")]
    for name in sparse_dataflow.__all__:
        assert f"sd.{name}" in page
        assert sum(f'id="sd.{name}"' in text for text in pages) == 1
    assert "balanced layout of a named pattern" in page
    package = ROOT / "sparse_dataflow"
    for room in [*package.glob("[abd-z]*/__init__.py"), *package.glob("c*/*/__init__.py")]:
        parts = room.parent.relative_to(package).parts
        page = ".".join(parts) if parts[0] == "core" else parts[0]
        text = (site / "api" / f"{page}.html").read_text(encoding="utf-8")
        for path in room.parent.rglob("[a-z]*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            assert f'id="{name}"' in text


def test_the_core_is_read_in_nine_files():
    rows = re.findall(r"^\| `([a-z_/]+\.py)` \|", (ROOT / "BUILD.md").read_text(), re.M)
    paths = [ROOT / "sparse_dataflow/core" / row for row in rows]
    assert len(paths) == 9
    assert sum(len(path.read_text().splitlines()) for path in paths) <= 5_000


@pytest.mark.slow
def test_the_pictures_are_drawn_from_the_code(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "draw_pictures.py"), str(tmp_path)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
        assert (ROOT / "docs" / "pictures" / path.name).exists()


def test_the_site_does_not_replace_other_files(tmp_path):
    (tmp_path / "index.html").write_text("other")
    done = build_site(tmp_path)
    assert done.returncode == 1 and "may not replace (index.html)" in done.stderr
    assert [path.read_text() for path in tmp_path.iterdir()] == ["other"]


def test_citation_and_licence_exist():
    import yaml

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0" and citation["title"] and citation["authors"]
    metadata = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    assert f"version = {citation['version']}\n" in metadata
    assert citation["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
