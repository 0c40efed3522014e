"""Continues the prompts of a terminal, as the text comes, or those of a file, in batches.

A composition of experts continues each prompt with the expert that its router picks.
"""

import dataclasses
import itertools
import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import jax

from sparse_dataflow.commands.models import load_model
from sparse_dataflow.commands.training_data import corpus_of, corpus_tokens, refuse_changed
from sparse_dataflow.core.messages import say
from sparse_dataflow.data.chat import USER
from sparse_dataflow.evaluation import activation_sparsity, generate
from sparse_dataflow.evaluation.composition import Experts, Prompt
from sparse_dataflow.evaluation.offloaded_experts import OffloadedExperts
from sparse_dataflow.evaluation.run_files import read_config
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files import json_files, output
from sparse_dataflow.files.errors import UserError


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


def converse(experts: Experts, samples: int, seed: int, **sampling: Any) -> None:
    """Continues each line of the input until it ends, each with the next seeds.

    Ctrl-C stops the text that is being written; at the prompt it ends the conversation.

    Args:
      experts: the model or models.
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
            write(experts, line, samples, first, **sampling)
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
    experts: Experts, prompt: str, samples: int, seed: int, chat: bool = False, **sampling: Any
) -> None:
    """Prints a prompt and its continuations; takes the arguments of `converse`.

    One continuation is printed as it comes.

    Raises:
      UserError: the prompt is too long for the model, or see `encoded_prompts`.
    """
    [name] = experts.choose([Prompt(prompt)])
    trained = experts.models[name]
    [tokens] = encoded_prompts(trained, [prompt], chat)
    generate.check_prompts([tokens], trained.model.vocab_size, trained.context)
    sampling["weights"] = _activated(experts, name)

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


def _activated(experts: Experts, name: str) -> Any:
    """Puts an expert on the device, and says its name and the time of the switch."""
    weights, switch = experts.activate(name)
    if switch:
        moved, milliseconds = switch.bytes / 1e6, 1e3 * switch.seconds
        say(f"{name}: {moved:,.1f} MB moved to the device in {milliseconds:,.1f} ms")
    elif name:
        say(f"{name}: on the device")
    return weights


def write_file(
    experts: Experts,
    prompts: Sequence[Prompt],
    batch: int,
    samples: int,
    seed: int,
    chat: bool = False,
    **sampling: Any,
) -> None:
    """Prints the continuations of prompts as JSON lines, in the order of the prompts.

    A text does not depend on the batch size.  All prompts of an expert come after one switch; their
    lines are printed as soon as all lines before them are.

    Args:
      experts: the model or models.
      prompts: see `read_prompts`.
      batch: number of continuations that are generated at once.
      samples: number of continuations of each prompt.
      seed: of the first continuation; each further one has the next seed.
      chat: see `encoded_prompts`.
      **sampling: see `evaluation.generate.generate`.

    Raises:
      UserError: a prompt is too long for its model, or see `encoded_prompts`.
    """
    names = experts.choose(prompts)
    groups = {n: [i for i, name in enumerate(names) if name == n] for n in dict.fromkeys(names)}
    encoded: dict[int, list[int]] = {}
    for name, numbers in groups.items():
        texts = [prompts[number].text for number in numbers]
        encoded.update(zip(numbers, encoded_prompts(experts.models[name], texts, chat)))
    # All prompts are checked before the first token, or a long file would fail after an hour.
    for number, name in enumerate(names):
        trained = experts.models[name]
        size, context = trained.model.vocab_size, trained.context
        generate.check_prompts([encoded[number]], size, context, first=number + 1)

    lines: dict[int, str] = {}
    printed = 0
    for name, numbers in groups.items():
        weights = _activated(experts, name)
        rows = [number * samples + sample for number in numbers for sample in range(samples)]
        for start in range(0, len(rows), batch):
            chosen = rows[start : start + batch]
            continuations = generate.generate(
                experts.models[name],
                [encoded[row // samples] for row in chosen],
                seed=[seed + row for row in chosen],
                weights=weights,
                **sampling,
            )
            for row, continuation in zip(chosen, continuations):
                fields = {
                    "prompt": prompts[row // samples].text,
                    "sample": row % samples,
                    "text": continuation.text,
                    "stopped_by": continuation.stopped_by,
                }
                fields |= {"run": name} if name else {}
                lines[row] = json.dumps(fields, ensure_ascii=False)
            # Experts finish their prompts in another order than the file has them.  A line is
            # printed as soon as all before it are, so that a killed command leaves a prefix of the
            # file.
            while printed in lines:
                print(lines.pop(printed), flush=True)
                printed += 1


def read_prompts(path: str, runs: Collection[str] = ()) -> list[Prompt]:
    """Reads prompts: one a line, or of .jsonl files a string or {"prompt": string} a line.

    Empty lines are skipped.

    Args:
      runs: names that a line may have as "run", which is not read if there are none.

    Raises:
      UserError: the file cannot be read, is empty, or a line has no prompt or an unknown run.
    """
    try:
        text = json_files.read_bytes(Path(path).expanduser()).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(f"The file of prompts {path} cannot be read: {error}.") from None
    prompts = []
    # `splitlines` would cut a prompt at form feeds and other separators too.
    for number, line in enumerate(text.split("\n"), start=1):
        line, run = line.removesuffix("\r"), ""
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
            if isinstance(value, dict) and runs:
                run = value.get("run") or ""
                if run and run not in runs:
                    raise UserError(
                        f"{path}, line {number}, names the run {run!r}; legal: {', '.join(runs)}, "
                        'or no "run" for the router\'s choice.'
                    )
            line = prompt
        prompts.append(Prompt(line, run))
    if not prompts:
        raise UserError(f"The file of prompts {path} is empty.")
    return prompts
