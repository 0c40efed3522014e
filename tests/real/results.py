"""What was measured of a real model: a file of rows, and the table of the page that it makes."""

import json
from pathlib import Path

from sparse_dataflow.files import storage

FOLDER = Path(__file__).parents[2] / "experiments/results/real_models"


def load(path):
    """Returns the rows of a file by name; none if there is none."""
    return json.loads(Path(path).read_text("utf-8")) if Path(path).exists() else {}


def add(path, name, row):
    """Adds a row to a file, in place of one of its name."""
    rows = load(path) | {name: row}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    storage.replace_text(Path(path), json.dumps(rows, indent=1) + "\n")


def table(rows):
    """Returns the table of a model in Markdown, the largest first."""
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
