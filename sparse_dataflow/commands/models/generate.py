"""Continues the prompts of a terminal, as the text comes, or those of a file, in batches."""

import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from sparse_dataflow.commands.models import load_model
from sparse_dataflow.commands.training_data import corpus_of, corpus_tokens, refuse_changed
from sparse_dataflow.core.messages import say
from sparse_dataflow.data.chat import USER
from sparse_dataflow.evaluation import activation_sparsity, decoded_form, generate, kv_cache
from sparse_dataflow.evaluation.offloaded_experts import OffloadedExperts
from sparse_dataflow.evaluation.run_files import read_config
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files import json_files, output
from sparse_dataflow.files.errors import UserError


@dataclasses.dataclass
class Writer:
    """A model that continues prompts.

    Attributes:
      model: without parameters if it has weights.
      weights: for decoding; None until `prepared` makes them from the model's parameters.
      form: of masked weights, see `decoded_form`.
    """

    model: Model
    weights: Any = None
    form: str = decoded_form.AUTO

    def prepared(self) -> kv_cache.Weights:
        """Returns the weights for decoding, which are prepared once."""
        if self.weights is None:
            self.weights = kv_cache.prepare(self.model.model, self.model.params, self.form)
        return self.weights


def with_thresholds(trained: Model, share: activation_sparsity.Share) -> Model:
    """Returns a run's model with thresholds from its training text.

    Args:
      share: see `activation_sparsity.with_thresholds`.

    Raises:
      UserError: the model is of no run, or its text cannot be read; or as
        `activation_sparsity.with_thresholds`.
    """
    if trained.record is None:
        raise UserError(
            f"--activation_sparsity needs the text that a run trained on, and {trained.folder} is "
            "a Hugging Face directory; legal here: 0."
        )
    data = read_config(trained.folder).data
    corpus, answers = corpus_of(data, trained.record.corpus), data.loss == "answers"
    refuse_changed(corpus, trained)
    tokens, _ = corpus_tokens(corpus, trained, answers)
    return activation_sparsity.with_thresholds(trained, tokens, share)


def offload_experts(options: load_model.ModelOptions, slots: int) -> tuple[Model, OffloadedExperts]:
    """Loads a model into host memory, without its experts to the device.

    Args:
      slots: experts of each layer on the device.

    Returns:
      (the model without parameters, its weights for decoding).

    Raises:
      UserError: see `load_model.load` and `OffloadedExperts`.
    """
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        model = load_model.load(options)
    return dataclasses.replace(model, params={}), OffloadedExperts(model, slots)


def say_traffic(offloaded: OffloadedExperts) -> None:
    """Says the bytes of weights on the device, and the experts that were fetched."""
    size, prompt, writing = offloaded.expert_bytes, offloaded.prompt, offloaded.writing
    held, total = offloaded.device_bytes / 1e6, offloaded.total_bytes / 1e6
    say(f"experts in host memory: {held:,.2f} of {total:,.2f} MB of weights on the device")
    say(f"prompts: {prompt.fetched * size / 1e6:,.2f} MB fetched for {prompt.tokens:,} tokens")
    if writing.tokens:
        fetched = writing.fetched * size / writing.tokens / 1e6
        resident, unused = writing.resident / writing.chosen, writing.unused
        say(
            f"writing: {fetched:,.3f} MB fetched a token; {resident:.0%} of the chosen experts "
            f"were on the device, {writing.hit_rate:.0%} of the others were fetched ahead; "
            f"{unused:,} of {writing.fetched:,} fetched experts were not chosen"
        )


def converse(writer: Writer, samples: int, seed: int, **sampling: Any) -> None:
    """Continues each line of the input until it ends, each with the next seeds.

    Ctrl-C stops the text that is being written; at the prompt it ends the conversation.

    Args:
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
            write(writer, line, samples, first, **sampling)
        except KeyboardInterrupt:
            print()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)


def encoded_prompts(trained: Model, prompts: Sequence[str], chat: bool) -> list[list[int]]:
    """Returns the tokens of prompts, with those that the tokenizer puts in front of a text.

    Args:
      chat: whether each is a message of a user, which the chat template renders.

    Raises:
      UserError: `chat`, and the tokenizer has no chat template or it refuses a message.
    """
    tokenizer = trained.tokenizer
    if not chat:
        return tokenizer.encode_prompts(prompts)
    if tokenizer.chat_template is None:
        raise UserError(
            f"The tokenizer of {trained.folder} has no chat template; leave --chat out."
        )
    messages = ([{"role": USER, "content": prompt}] for prompt in prompts)
    texts = [tokenizer.chat_template.render(message, prompt=True) for message in messages]
    return [ids.tolist() or [tokenizer.start_id] for ids in tokenizer.encode_chat(texts)]


def write(
    writer: Writer, prompt: str, samples: int, seed: int, chat: bool = False, **sampling: Any
) -> None:
    """Prints a prompt and its continuations; takes the arguments of `converse`.

    One continuation is printed as it comes.

    Raises:
      UserError: the prompt is too long for the model, or see `encoded_prompts`.
    """
    trained = writer.model
    [tokens] = encoded_prompts(trained, [prompt], chat)
    generate.check_prompts([tokens], trained.model.vocab_size, trained.context)
    sampling["weights"] = writer.prepared()

    def print_text(index, text):
        output.print_text(text, end="")

    if samples == 1:
        output.print_text(prompt, end="")
        sampling["on_token"] = print_text
    seeds = range(seed, seed + samples)
    continuations = generate.generate(trained, [tokens] * samples, seed=seeds, **sampling)
    for number, continuation in enumerate(continuations, start=1):
        if samples == 1:
            print()
        else:
            output.print_text(f"--- {number} of {samples}\n{prompt}{continuation.text}")
        if continuation.stopped_by == "context":
            print(f"(The context of {trained.context} tokens is full.)", file=sys.stderr)


def write_file(
    writer: Writer,
    prompts: Sequence[str],
    batch: int,
    samples: int,
    seed: int,
    chat: bool = False,
    **sampling: Any,
) -> None:
    """Prints the continuations of prompts as JSON lines, in the order of the prompts.

    A text does not depend on the batch size.

    Args:
      batch: number of continuations that are generated at once.
      samples: number of continuations of each prompt.
      seed: of the first continuation; each further one has the next seed.
      chat: see `encoded_prompts`.
      **sampling: see `evaluation.generate.generate`.

    Raises:
      UserError: a prompt is too long for its model, or see `encoded_prompts`.
    """
    trained = writer.model
    encoded = encoded_prompts(trained, prompts, chat)
    # All prompts are checked before the first token, or a long file would fail after an hour.
    generate.check_prompts(encoded, trained.model.vocab_size, trained.context)
    weights = writer.prepared()
    rows = range(len(prompts) * samples)
    for start in range(0, len(rows), batch):
        chosen = rows[start : start + batch]
        continuations = generate.generate(
            trained,
            [encoded[row // samples] for row in chosen],
            seed=[seed + row for row in chosen],
            weights=weights,
            **sampling,
        )
        for row, continuation in zip(chosen, continuations):
            fields = {
                "prompt": prompts[row // samples],
                "sample": row % samples,
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
    # `splitlines` would cut a prompt at form feeds and other separators too.
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
