"""Evaluates what a run has trained, with lm-eval: held-out loss, zero-shot and few-shot.

    python -m experiments.evaluate --run=runs/gpt13b_sparse-DATE
    python -m experiments.evaluate --run=DIR --tasks=cloze,last_word --num_fewshot=0,5
    python -m experiments.evaluate --run=DIR --tasks=hellaswag,lambada_openai   data by network
    python -m experiments.evaluate --run=DIR --against=OTHER,OTHER:narrow,MODEL  several models
    python -m experiments.evaluate --run=DIR --tasks=questions.jsonl            your own
    python -m experiments.evaluate --run=MODEL --corpus=FOLDER     a Hugging Face directory
    python -m experiments.evaluate --run=DIR --tasks=mine.yaml,FOLDER           lm-eval's YAML
    python -m experiments.evaluate --run=DIR --activation_sparsity=0.4          small inputs are 0

The sparse model and its dense twin answer the same items and are compared item by item. The own
tasks need no network: five are cut from the documents that the run held out, four are drawn from a
rule (agreement, copying, brackets, arithmetic). The table also shows chance, and a unigram and a
bigram model of the training documents. A file of your own has one JSON
object a line: {"context": text, "choices": [texts], "answer": index}.  Tasks of lm-eval's own, and
those in YAML, report all of their metrics.

--activation_sparsity lets the smallest inputs of each projection count as zeros in every model
(TEAL). Thresholds come from about 1,000 training tokens.

Leaves RUN/evaluation.json and a section in RUN/report.html. A Hugging Face directory is evaluated
on the documents that a run on --corpus would hold out. Needs the extra eval.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.commands.models.load_model import ActivationOptions
from sparse_dataflow.core.config.settings import AT_LEAST_TWO, AT_LEAST_ZERO, setting
from sparse_dataflow.evaluation import refuse_without_lm_eval

VARIANTS = ("sparse", "dense", "narrow")
COMPARED = VARIANTS[:2]
"""Evaluated where --variant names none."""


@dataclasses.dataclass(frozen=True)
class Options(ActivationOptions):
    """The flags."""

    run: str = setting("", "Run folder, Hugging Face directory, or its name on the hub.", path=True)
    against: str = setting(
        "",
        "Comma list of other runs on the same corpus and of Hugging Face directories: the dense "
        "model of each, where it has one, or the one after a colon, as in OTHER:narrow.",
        path=True,
    )
    corpus: str = setting(
        "", "Corpus of a Hugging Face directory; empty is python_stdlib.", path=True
    )
    variant: tuple[str, ...] = setting(
        COMPARED, "Models of the run; those that it has.", choices=VARIANTS
    )
    checkpoint: str = setting("newest", "newest, best (held-out loss) or a step.")
    tasks: str = setting(
        "own",
        "Comma list of: own (every own task that the corpus gives), last_word, continuation, "
        "cloze, docstring_body, call_name, agreement, copying, brackets, arithmetic, lm-eval's "
        "tasks, YAML files and folders of such tasks, files of JSON lines.",
    )
    include_path: str = setting(
        "", "Comma list of folders whose YAML files define further tasks, as in lm-eval."
    )
    num_fewshot: tuple[int, ...] = setting(
        (),
        "Numbers of examples in the prompt; empty is the number that a task has, else 0, 1 and 5.",
        legal=AT_LEAST_ZERO,
    )
    trust_tasks: bool = setting(
        False,
        "Whether task files may run their own code, as with !function and templates of any kind.",
    )
    items: int = setting(200, "Items that are made for each own task.", legal=AT_LEAST_TWO)
    limit: int = setting(0, "Most items of a task to score; 0 is all.", legal=AT_LEAST_ZERO)
    seed: int = setting(0, "Draws the items of the own tasks.", legal=AT_LEAST_ZERO)
    mesh: str = setting(
        "auto",
        "Devices along the axes data, fsdp, feature, tensor, as in data:2,tensor:4; auto is fsdp "
        "on all devices.",
    )


def main(options):
    """Evaluates, prints a table and writes it to the run; see the module docstring."""
    refuse_without_lm_eval()
    from sparse_dataflow.commands.models import evaluate

    evaluate.evaluate(options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, options=Options)
