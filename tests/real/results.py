"""What was measured of a real model: a file of rows, and the table of the page that it makes."""

import json
import re
from pathlib import Path

from experiments.studies import task_table
from sparse_dataflow.files import storage

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments/results/real_models"
PAGE = ROOT / "docs/evidence/real_models.md"
START, END = "<!-- Written by tests/real/table.py. -->", "<!-- End of what it wrote. -->"
NAMES = {"smollm2": "SmolLM2", "gemma3": "Gemma 3"}
LINE = 96


def load(path):
    """Returns the rows of a file by name; none if there is none."""
    return json.loads(Path(path).read_text("utf-8")) if Path(path).exists() else {}


def add(path, name, row):
    """Adds a row to a file, in place of one of its name."""
    rows = load(path) | {name: row}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    storage.replace_text(Path(path), json.dumps(rows, indent=1) + "\n")


def table(rows):
    """Returns the table of a file in Markdown: of its tasks, its speeds, or its models."""
    if "averages" in rows:
        return tasks_table(rows)
    return speed_table(rows) if "rows" in rows else models_table(rows)


def models_table(rows):
    """Returns the table of a model's forms in Markdown, the largest first."""
    head = [
        "what is stored", "MB", "perplexity of prose", "of Python", "MB, int8", "prose", "Python"
    ]  # fmt: skip
    lines = [head, ["---"] * len(head)]
    for row in sorted(rows.values(), key=lambda row: -row["bytes"]):
        line = [row["label"], *_cells(row)]
        lines.append([*line, *(_cells(row["int8"]) if "int8" in row else ["", "", ""])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("  ", " ")


def _cells(row):
    return (
        f"{row['bytes'] / 1e6:.0f}",
        f"{row['perplexity']['prose']:.1f}",
        (f"{row['perplexity']['code']:.2f}"),
    )


def speed_table(result):
    """Returns the table of `speed.py` in Markdown."""
    lines = [
        "| program | tokens a second | over F16 of llama.cpp | tokens of a prompt a second |",
        "|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        token, prompt = row["tokens_per_second"], row["prompt_tokens_per_second"]
        lines.append(f"| {name} | {token:.1f} | {row['speed_over_f16']:.2f} | {prompt:.0f} |")
    return "\n".join(lines)


def tasks_table(result):
    """Returns the table of `tasks.py` in Markdown, without the loss of its few texts."""
    lines = task_table.as_text(result).partition("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if not line.startswith("| held-out"))


def page():
    """Returns the text of the page with the tables and commands of all files."""
    before, _, rest = PAGE.read_text("utf-8").partition(START)
    _, _, after = rest.partition(END)
    sections = [section(load(path)) for path in sorted(FOLDER.glob("*.json"))]
    return "\n\n".join([before + START, *sections, END + after])


def section(rows):
    """Returns a heading, the table and the commands of a file."""
    if "rows" in rows:
        title = "Tasks" if "averages" in rows else "Tokens a second"
        title += f", {NAMES[_flags(rows['command']).get('model', 'smollm2')]}"
        command = f"{rows['command']}   # needs make real first"
        return f"### {title}\n\n{table(rows)}\n\n```\n{command}\n```"
    groups = {}
    for name, row in rows.items():
        flags = _flags(row["command"])
        conditions = tuple(flags.get(flag, "0") for flag in ("model", "tokens", "tested", "layers"))
        groups.setdefault(conditions, []).append(name)
    commands = [line for group in groups.items() for line in _commands(*group)]
    ((model, tested, layers),) = {(group[0], group[2], group[3]) for group in groups}
    title = f"{NAMES[model]}, {int(tested):,} tokens of each text"
    title += f", {layers} layers pruned" if layers != "0" else ""
    return "\n".join([f"### {title}", "", models_table(rows), "", "```", *commands, "```"])


def _flags(command):
    return dict(re.findall(r"--(\w+)=(\S+)", command))


def _commands(conditions, names):
    """Returns the lines of the commands that compute rows; a line is at most `LINE` long."""
    model, tokens, tested, layers = conditions
    first = f"python tests/real/table.py --model={model} --tokens={tokens} --tested={tested}"
    first += f" --layers={layers}" if layers != "0" else ""
    chunks = [[]]
    for name in names:
        if len(",".join([*chunks[-1], name])) > LINE - 40:
            chunks.append([])
        chunks[-1].append(name)
    rows = (",".join(chunk) for chunk in chunks)
    return [f"{first} \\\n    --rows={each}   # needs make real first" for each in rows]
