"""Prompts continued on the terminal, as the text comes."""

import sys
from typing import Any

from sparse_dataflow.evaluation import generate
from sparse_dataflow.evaluation.trained import Trained
from sparse_dataflow.files.errors import UserError


def converse(trained: Trained, **sampling: Any) -> None:
    """Continues each line of the input until it ends.

    Ctrl-C stops the text that is being written; at the prompt it ends the conversation.

    Args:
      trained: the model.
      **sampling: see `evaluation.generate.generate`.
    """
    terminal = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if terminal else "")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        try:
            write(trained, line, **sampling)
        except KeyboardInterrupt:
            print()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)


def write(trained: Trained, prompt: str, **sampling: Any) -> None:
    """Prints a prompt and its continuation; takes the arguments of `converse`.

    Raises:
      UserError: the prompt is too long for the model.
    """
    tokens = trained.tokenizer.encode(prompt).tolist() or [trained.tokenizer.eot_id]
    generate.check_prompts([tokens], trained.model.vocab_size, trained.context)
    print(prompt, end="", flush=True)
    generate.generate(
        trained,
        [tokens],
        **sampling,
        on_token=lambda number, text: print(text, end="", flush=True),
    )
    print()
