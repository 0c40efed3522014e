"""Loads the runs of `experiments.generate --runs`, a composition of experts, and its router."""

import os
from collections.abc import Sequence

import jax

from sparse_dataflow.commands.program_cache import keep_programs
from sparse_dataflow.commands.training_data import corpus_of
from sparse_dataflow.core.messages import say
from sparse_dataflow.data import cache
from sparse_dataflow.data.corpora import load_corpus
from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.examples import as_text
from sparse_dataflow.evaluation.composition import Composition
from sparse_dataflow.evaluation.router import Router
from sparse_dataflow.evaluation.run_files import read_config, read_record, read_tokenizer
from sparse_dataflow.files.errors import UserError, first_line
from sparse_dataflow.interchange import load as loading
from sparse_dataflow.interchange.hub_models import local_folder
from sparse_dataflow.interchange.huggingface import is_directory


def run_names(runs: str) -> list[str]:
    """Returns the folders of a comma list, which are the names of the experts.

    Raises:
      UserError: there is one alone, one twice, or a folder that has no model.
    """
    names = _split(runs)
    if len(names) < 2:
        raise UserError(f"--runs={runs} is one run; give two or more, or --run={runs}.")
    first: dict[str, str] = {}
    if not all(names):
        raise UserError(f"--runs={runs} has an empty name; legal: folders with commas between.")
    for name in names:
        path = os.path.realpath(name)
        if path in first:
            raise UserError(f"--runs names {first[path]} twice; legal: each folder once.")
        first[path] = name
        loading.variants(name)
    return names


def _split(names: str) -> list[str]:
    """Returns the names of a comma list, with `~` expanded as in flags that name a path."""
    return [os.path.expanduser(name.strip()) for name in names.split(",")]


def load(
    names: Sequence[str], variant: str, checkpoint: str, routed: bool, corpora: str
) -> Composition:
    """Loads runs into host memory, one after another, after the text of their router.

    Args:
      variant: of every run; see `interchange.load.load`.
      checkpoint: of every run.
      routed: whether a prompt may not name its run, so that a router is needed.
      corpora: comma list of a corpus for each run; "" for those that the runs trained on.

    Raises:
      UserError: a training text cannot be read, or see `interchange.load.load`.
    """
    keep_programs()
    composition = Composition(Router(_texts(names, corpora)) if routed else None)
    for name in names:
        composition.add(name, loading.load(name, variant, checkpoint))
    size = sum(map(composition.bytes, names))
    say(f"{len(names)} runs are in host memory: {size / 1e6:,.1f} MB")
    if jax.default_backend() == "cpu":
        say("the device is a CPU: a switch is a copy within its memory")
    return composition


def _texts(names: Sequence[str], corpora: str) -> dict[str, Corpus]:
    if not corpora:
        return {name: _training_text(name) for name in names}
    given = _split(corpora)
    if len(given) != len(names):
        raise UserError(
            f"--router_corpora has {len(given)} names for {len(names)} runs; legal: one for each, "
            "in the order of --runs."
        )
    return {
        name: load_corpus(corpus, cache.FOLDER) for name, corpus in zip(names, given, strict=True)
    }


def _training_text(name: str) -> Corpus:
    needs = (
        f"The router needs the training text of {name}; name a text for each run with "
        "--router_corpora, or the run of each prompt with --prompts. "
    )
    folder = local_folder(name)
    if is_directory(folder):
        raise UserError(f"{needs}The folder is a Hugging Face directory, which names no corpus.")
    config = read_config(folder)
    record = read_record(folder, config)
    answers = config.data.loss == "answers"
    try:
        corpus = corpus_of(config.data, record.corpus)
    except UserError as error:
        raise UserError(f"{needs}{first_line(error)}") from error
    return as_text(corpus, read_tokenizer(folder, record)) if answers else corpus
