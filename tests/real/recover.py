"""Trains the pruned SmolLM2 on, with the dense model as teacher; `table.py` scores what it leaves.

python tests/real/recover.py          80 minutes of one core

The model is that of `table.py --rows=single_50`.  It learns the teacher's predictions alone, on the
calibration side of both texts, half prose and half Python.  Needs `make real` first.
"""

import argparse
import subprocess
import sys

from tests.real import models, texts

PRUNED = models.FOLDER / "smollm2-single_50-16384-30"
RUN = models.FOLDER / "smollm2-recovered"
WATCHED = 2
"""Pages of prose on which the run says its loss; the others are trained on."""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=250, help="of 1,024 tokens")
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    options = parser.parse_args()
    pages = texts.prose(models.FOLDER)[0]
    for kind, some in (("watched", pages[:WATCHED]), ("prose", pages[WATCHED:])):
        (models.FOLDER / kind).mkdir(exist_ok=True)
        for number, page in enumerate(some):
            (models.FOLDER / kind / f"{number:03}.txt").write_text(page, "utf-8")
    settings = {
        "data.validation": models.FOLDER / "watched",
        "training.sequence": 512,
        "training.teacher": models.smollm2(),
        "training.teacher_weight": 1,
        "training.learning_rate": options.learning_rate,
        "training.sparse_rate": 1,
        "training.vector_rate": 1,
        "training.weight_decay": 0,
        "run.eval_every": 50,
        "run.checkpoint_every": 50,
    }
    command = [
        *(sys.executable, "-m", "sparse_dataflow", "train", f"--init_from={PRUNED}", "--twin=no"),
        *(f"--corpus={models.FOLDER / 'prose'}:1,python_stdlib:1", "--batch=2"),
        *(f"--steps={options.steps}", f"--out={RUN}"),
        *(word for item in settings.items() for word in ("--set", "=".join(map(str, item)))),
    ]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
