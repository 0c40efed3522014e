"""Multiple-choice tasks of BIG-bench: SmolLM2 dense, rounded by llama.cpp's types, and pruned.

python tests/real/tasks.py                             ten tasks, an hour of one core
python tests/real/tasks.py --tasks=above               seven, whose choice took half of that
python tests/real/tasks.py --tasks=strategyqa --items=20 --rows=dense,Q8_0

Of short tasks with few choices the ten are taken that the dense model can do best without examples,
on `CHOOSING` items of each.  The table is of other items.  Needs `make real`, and
for the row `pruned` the model that `table.py --rows=single_50` leaves; further rows are NAME=DIR.
"""

import argparse
import json
import math
import random
import subprocess
import sys
import tarfile
from pathlib import Path

from sparse_dataflow.commands.models import evaluate
from sparse_dataflow.files import storage
from sparse_dataflow.files.json_files import parse
from tests.real import models, results

PACKAGE = "bigbench==1.0.0"
CANDIDATES = (
    "anachronisms",
    "arithmetic/1_digit_addition",
    "arithmetic/2_digit_division",
    "dark_humor_detection",
    "date_understanding",
    "disambiguation_qa",
    "emoji_movie",
    "emojis_emotion_prediction",
    "empirical_judgments",
    "english_russian_proverbs",
    "entailed_polarity",
    "epistemic_reasoning",
    "fact_checker/fever",
    "fact_checker/politifact",
    "fantasy_reasoning",
    "formal_fallacies_syllogisms_negation",
    "goal_step_wikihow/goal_inference",
    "goal_step_wikihow/step_ordering",
    "hindu_knowledge",
    "hinglish_toxicity",
    "hyperbaton",
    "implicatures",
    "intent_recognition",
    "irony_identification",
    "logical_deduction/three_objects",
    "logical_fallacy_detection",
    "metaphor_boolean",
    "misconceptions",
    "moral_permissibility",
    "movie_dialog_same_or_different",
    "movie_recommendation",
    "multiemo/hotels_sentence_en",
    "navigate",
    "odd_one_out",
    "penguins_in_a_table",
    "phrase_relatedness",
    "physical_intuition",
    "physics",
    "presuppositions_as_nli",
    "ruin_names",
    "simple_ethical_questions",
    "snarks",
    "social_iqa",
    "social_support",
    "sports_understanding",
    "strategyqa",
    "tracking_shuffled_objects/three_objects",
    "undo_permutation/reorder_words",
    "unit_conversion/unit_identification",
    "vitaminc_fact_verification",
    "winowhy",
)
CHOOSING, MEASURED, TASKS = 30, 40, 10
ABOVE = (
    "reorder_words",
    "unit_identification",
    "2_digit_division",
    "date_understanding",
    "penguins_in_a_table",
    "1_digit_addition",
    "odd_one_out",
)
"""Tasks that the dense model was more than two standard errors above chance in, of CANDIDATES."""


def unpacked(folder):
    """The folder with the tasks of BIG-bench, which pip downloads once."""
    place = folder / "bigbench"
    if not place.is_dir():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:"]
        subprocess.run([*pip, "--no-build-isolation", f"--dest={folder}", PACKAGE], check=True)
        (archive,) = folder.glob("bigbench-*.tar.gz")
        with tarfile.open(archive) as opened:
            for member in opened:
                if member.name.endswith("/task.json"):
                    member.name = member.name.partition("benchmark_tasks/")[2]
                    opened.extract(member, folder / "bigbench.partial", filter="data")
        (folder / "bigbench.partial").rename(place)
    return place


def split(source, folder, items):
    """Writes two files of the items of a task, which have none in common; returns their paths."""
    task = parse((source / "task.json").read_text("utf-8"))
    random.Random(0).shuffle(task["examples"])  # Many files are sorted by the answer.
    name, paths = source.name, []
    for kind, start, count in (("choosing", 0, CHOOSING), (f"measured_{items}", 1, items)):
        path = folder / kind / name / "task.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        examples = task["examples"][start::2][:count]
        path.write_text(json.dumps({**task, "examples": examples}), "utf-8")
        paths.append(path)
    return paths


def distance(row):
    """Standard errors of guessing between the score of the dense model and chance."""
    (score,) = row["models"].values()
    chance = row["chance"]
    return (score["value"] - chance) / math.sqrt(chance * (1 - chance) / row["items"])


def chosen(path, files, corpus):
    """The names of the tasks that the model can do best, and how far it is above chance."""
    from experiments.evaluate import Options

    tasks = ",".join(map(str, files))
    options = Options(run=str(path), tasks=tasks, num_fewshot=(0,), corpus=str(corpus))
    above = {row["task"]: distance(row) for row in evaluate.evaluated(options)["rows"][1:]}
    best = sorted(above, key=above.get, reverse=True)[:TASKS]
    return {name: round(above[name], 2) for name in best}


def row_of(name, path):
    """The model of a row, as `task_table` takes it."""
    places = {
        "dense": lambda: path,
        "Q8_0": lambda: models.as_type(path, models.FOLDER, "Q8_0", "Q8_0"),
        "Q4_0": lambda: models.as_type(path, models.FOLDER, "Q4_0", "Q8_0"),
        "pruned": lambda: models.FOLDER / "smollm2-single_50-16384-30",
    }
    return f"{name}={places[name]()}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2", choices=["smollm2"])
    parser.add_argument("--tasks", default="", help="names, or above; empty chooses")
    parser.add_argument("--items", type=int, default=MEASURED, help="of each task")
    parser.add_argument("--shots", default="0,3", help="numbers of examples in the prompt")
    parser.add_argument("--rows", default="dense,Q4_0,pruned", help="these, or NAME=DIR")
    parser.add_argument("--out", default=str(results.FOLDER))
    options = parser.parse_args()
    path = models.smollm2()
    folder = models.FOLDER / "tasks"
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number in range(4):
        (corpus / f"{number}.txt").write_text("The tasks have their own texts.\n" * 9, "utf-8")
    place = unpacked(models.FOLDER)
    files = [split(place / name, folder, options.items) for name in CANDIDATES]
    choice = folder / "chosen.json"
    if not (options.tasks or choice.exists()):
        best = chosen(path, [choosing for choosing, _ in files], corpus)
        storage.replace_text(choice, json.dumps(best))
    best = options.tasks.split(",") if options.tasks else json.loads(choice.read_text("utf-8"))
    best = list(ABOVE) if options.tasks == "above" else best
    measured = [str(file) for _, file in files if file.parent.name in best]
    rows = ",".join(row if "=" in row else row_of(row, path) for row in options.rows.split(","))
    command = [sys.executable, "-m", "experiments.task_table", f"--models={rows}"]
    command += [f"--tasks={','.join(measured)}", f"--num_fewshot={options.shots}"]
    out = folder / ("some" if options.tasks else "table")
    subprocess.run([*command, f"--corpus={corpus}", f"--out={out}"], check=True)
    table = json.loads((out / "task_table.json").read_text("utf-8"))
    table |= {"command": " ".join(["python", "tests/real/tasks.py", *sys.argv[1:]]), "chosen": best}
    target = Path(options.out) / "tasks_smollm2.json"
    storage.replace_text(target, json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
