"""Mixtures of corpora, NAME:WEIGHT,NAME:WEIGHT: none trains what another one holds out."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from sparse_dataflow.data.corpus.splits import Corpus, joined, without
from sparse_dataflow.data.local_files import say_once
from sparse_dataflow.files.errors import UserError


def exists(name: str) -> bool:
    """Returns whether a text is the path of a file or folder."""
    try:
        return Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return False  # Too long for a path, or the home folder of nobody.


def mixture_weights(text: str) -> dict[str, float]:
    """Returns the weights of a mixture by the names of its corpora; they add up to 1.

    Returns:
      {} for the name of one corpus: a text without a comma, or an existing path.

    Raises:
      UserError: a name is missing or repeated, or a weight is not a number above 0.
    """
    if "," not in text or exists(text):
        return {}
    weights: dict[str, float] = {}
    for source in text.split(","):
        # The last colon: an address has others.
        name, _, number = source.strip().rpartition(":")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or not 0 < weight < math.inf:
            raise UserError(
                f"The mixture has {source.strip()[:60]!r}; legal: NAME:WEIGHT with a weight above "
                "0, such as books:0.7,code:0.3."
            )
        if name in weights:
            raise UserError(f"The mixture has {name!r} twice; legal: each corpus once.")
        weights[name] = weight
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def short_names(names: Sequence[str]) -> list[str]:
    """Returns the last words of the names without their revisions, or the whole names where those
    are not unique."""
    names = [name.partition("@")[0] if name.startswith("hf:") else name for name in names]
    short = [Path(name).name or name for name in names]
    return short if len(set(short)) == len(short) else list(names)


def mixed(name: str, sources: dict[str, Corpus], weights: dict[str, float]) -> Corpus:
    """Returns a mixture, of which no corpus trains what another one holds out."""
    corpora, disjoint = list(sources.values()), []
    if len({bool(corpus.ids) for corpus in corpora}) > 1:
        say_once(f"{name}: copies of held-out text are not looked for between text and token ids")
    for number, corpus in enumerate(corpora):
        others = corpora[:number] + corpora[number + 1 :]
        held_digests = np.unique(np.concatenate([other.sides.held_out for other in others]))
        corpus = without(corpus, held_digests)
        if corpus.ids:
            elsewhere = tuple(other.ids.validation for other in others if other.ids)
            corpus = replace(corpus, ids=replace(corpus.ids, elsewhere=elsewhere))
        disjoint.append(corpus)
    names = short_names(list(sources))
    return joined(name, tuple(zip(names, disjoint, weights.values(), strict=True)))
