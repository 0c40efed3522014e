"""Evaluates what a run has trained, with lm-eval: held-out loss, zero-shot and few-shot.

    python -m experiments.evaluate --run=runs/gpt13b_sparse-DATE
    python -m experiments.evaluate --run=DIR --tasks=cloze,last_word --num_fewshot=0,5
    python -m experiments.evaluate --run=DIR --tasks=hellaswag,lambada_openai   data by network
    python -m experiments.evaluate --run=DIR --against=OTHER                    two runs
    python -m experiments.evaluate --run=DIR --tasks=questions.jsonl            your own

The sparse model and its dense twin answer the same items and are compared item by item. The own
tasks are cut from the documents that the run held out and need no network; what chance, a unigram
and a bigram model of the training documents reach stands beside them. A file of your own has one
JSON object a line: {"context": text, "choices": [texts], "answer": index}.

Leaves RUN/evaluation.json and a section in RUN/report.html. Needs the extra eval.
"""

import importlib.util

from experiments import flags
from experiments.command_line import AT_LEAST_TWO, AT_LEAST_ZERO, Flag, Group
from sparse_dataflow.files.errors import UserError

EVALUATION = Group(
    "Evaluation",
    "what is asked of which model",
    (
        Flag("run", "text", "", "Run folder."),
        Flag(
            "against",
            "text",
            "",
            "Another run on the same corpus: its model, the dense one where it has one, is the "
            "twin.",
        ),
        Flag(
            "variant",
            "list",
            "all",
            "Models of the run; those that it has.",
            ("sparse", "dense"),
        ),
        Flag("checkpoint", "text", "newest", "newest, best (held-out loss) or a step."),
        Flag(
            "tasks",
            "text",
            "own",
            "Comma list of: own (every own task that the corpus gives), last_word, continuation, "
            "cloze, docstring_body, call_name, lm-eval's tasks, files of JSON lines.",
        ),
        Flag("num_fewshot", "text", "0,1,5", "Comma list of examples in the prompt."),
        Flag(
            "items",
            "integer",
            200,
            "Items that are made for each own task.",
            legal=AT_LEAST_TWO,
        ),
        Flag(
            "limit",
            "integer",
            0,
            "Items of each task that are asked; 0 is all.",
            legal=AT_LEAST_ZERO,
        ),
        Flag(
            "seed",
            "integer",
            0,
            "Draws the items of the own tasks.",
            legal=AT_LEAST_ZERO,
        ),
        Flag(
            "mesh",
            "text",
            "auto",
            "Devices along the axes data, fsdp and tensor, as in data:2,tensor:4; auto is fsdp on "
            "all devices.",
        ),
    ),
)
GROUPS = (EVALUATION,)


def main(values):
    """Evaluates, prints a table and keeps it; see the module docstring."""
    refuse_without_lm_eval()
    from experiments import evaluation_runs

    evaluation_runs.run(values)


def refuse_without_lm_eval() -> None:
    """UserError where the package lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "Evaluation needs the package lm-eval: pip install 'sparse_dataflow[eval]', or "
            "pip install lm-eval."
        )


if __name__ == "__main__":
    flags.run(main, __doc__, GROUPS)
