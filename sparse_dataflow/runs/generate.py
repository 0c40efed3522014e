"""Continues the prompts of a terminal, as the text comes, or those of a file, in batches."""

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparse_dataflow.data.chat import USER
from sparse_dataflow.evaluation import generate
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError


def converse(trained: Model, samples: int, seed: int, **sampling: Any) -> None:
    """Continues each line of the input until it ends, each with the next seeds.

    Ctrl-C stops the text that is being written; at the prompt it ends the conversation.

    Args:
      trained: the model.
      samples: number of continuations of each line.
      seed: of the first continuation.
      **sampling: `chat` of `encoded_prompts`; for the rest see `evaluation.generate.generate`.
    """
    terminal = sys.stdin.isatty()
    for first in itertools.count(seed, samples):
        try:
            line = input("> " if terminal else "")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        try:
            write(trained, line, samples, first, **sampling)
        except KeyboardInterrupt:
            print()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)


def encoded_prompts(trained: Model, prompts: Sequence[str], chat: bool) -> list[list[int]]:
    """Returns the tokens of prompts; those of an empty one are the end of text.

    Args:
      trained: the model.
      prompts: the texts.
      chat: whether each is a message of a user, which the chat template renders.

    Raises:
      UserError: `chat`, and the tokenizer has no chat template or it refuses a message.
    """
    tokenizer = trained.tokenizer
    if not chat:
        encoded = tokenizer.encode_batch(prompts)
    elif tokenizer.chat_template is None:
        raise UserError(
            f"The tokenizer of {trained.folder} has no chat template; leave --chat out."
        )
    else:
        messages = ([{"role": USER, "content": prompt}] for prompt in prompts)
        texts = [tokenizer.chat_template.render(message, prompt=True) for message in messages]
        encoded = tokenizer.encode_chat(texts)
    return [ids.tolist() or [tokenizer.eot_id] for ids in encoded]


def write(
    trained: Model, prompt: str, samples: int, seed: int, chat: bool = False, **sampling: Any
) -> None:
    """Prints a prompt and its continuations; takes the arguments of `converse`.

    One continuation is printed as it comes.

    Raises:
      UserError: the prompt is too long for the model, or see `encoded_prompts`.
    """
    [tokens] = encoded_prompts(trained, [prompt], chat)
    generate.check_prompts([tokens], trained.model.vocab_size, trained.context)

    def print_text(index, text):
        print(text, end="", flush=True)

    if samples == 1:
        print(prompt, end="", flush=True)
        sampling["on_token"] = print_text
    seeds = range(seed, seed + samples)
    continuations = generate.generate(trained, [tokens] * samples, seed=seeds, **sampling)
    for number, continuation in enumerate(continuations, start=1):
        if samples == 1:
            print()
        else:
            print(f"--- {number} of {samples}\n{prompt}{continuation.text}")
        if continuation.stopped_by == "context":
            print(f"(The context of {trained.context} tokens is full.)", file=sys.stderr)


def write_file(
    trained: Model,
    path: str,
    batch: int,
    samples: int,
    seed: int,
    chat: bool = False,
    **sampling: Any,
) -> None:
    """Prints the continuations of a file's prompts as JSON lines, in the order of the file.

    A text does not depend on the batch size.

    Args:
      trained: the model.
      path: see `read_prompts`.
      batch: number of continuations that are generated at once.
      samples: number of continuations of each prompt.
      seed: of the first continuation; each further one has the next seed.
      chat: see `encoded_prompts`.
      **sampling: see `evaluation.generate.generate`.

    Raises:
      UserError: the file cannot be used, or a prompt is too long for the model.
    """
    prompts = read_prompts(path)
    encoded = encoded_prompts(trained, prompts, chat)
    generate.check_prompts(encoded, trained.model.vocab_size, trained.context)
    rows = list(itertools.product(range(len(prompts)), range(samples)))
    for start in range(0, len(rows), batch):
        chosen = rows[start : start + batch]
        seeds = range(seed + start, seed + start + len(chosen))
        tokens = [encoded[prompt] for prompt, _ in chosen]
        for (prompt, sample), continuation in zip(
            chosen, generate.generate(trained, tokens, seed=seeds, **sampling)
        ):
            fields = {
                "prompt": prompts[prompt],
                "sample": sample,
                "text": continuation.text,
                "stopped_by": continuation.stopped_by,
            }
            print(json.dumps(fields, ensure_ascii=False), flush=True)


def read_prompts(path: str) -> list[str]:
    """Reads prompts: one a line, or of .jsonl files a string or {"prompt": string} a line.

    Empty lines are skipped.

    Raises:
      UserError: the file cannot be read, is empty, or a line has no prompt.
    """
    try:
        text = json_files.read_bytes(Path(path).expanduser()).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(f"The file of prompts {path} cannot be read: {error}.") from None
    prompts = []
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        if path.endswith(".jsonl"):
            try:
                value = json_files.parse(line)
            except ValueError:
                value = None
            prompt = value.get("prompt") if isinstance(value, dict) else value
            if not isinstance(prompt, str):
                raise UserError(
                    f"{path}, line {number}, has no prompt; legal: a JSON string, or an object "
                    'with "prompt".'
                )
            line = prompt
        prompts.append(line)
    if not prompts:
        raise UserError(f"The file of prompts {path} is empty.")
    return prompts
