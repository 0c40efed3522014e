"""Tasks whose items are drawn from a rule: agreement, copying, brackets and small sums.

They need no documents, so a model of any corpus can answer them; what words mean matters in
`agreement` alone.  Every choice of an item is likely by itself, and the rule makes one of them
right.
"""

from collections.abc import Callable

import numpy as np

from sparse_dataflow.evaluation.tasks.items import Item

Draw = Callable[[np.random.Generator, int], tuple[str, list[str]]]
"""(random generator, tokens) -> a context and its choices, the right one first."""

_ATTEMPTS = 50
"""Draws for each item, after which a rule has no more different ones."""

_NOUNS = (
    "author book bird boy car cat child:children city:cities class:classes cloud dog door engine "
    "farmer file flower friend function garden girl house key king lamp letter list lock machine "
    "man:men map mirror module movie number object page painter picture pilot planet queen river "
    "road room school ship sister song state student table teacher test tower tree value voice "
    "wall window woman:women word writer"
).split()
NOUNS = {one: many or f"{one}s" for one, _, many in (noun.partition(":") for noun in _NOUNS)}
"""Singular -> plural of nouns that small vocabularies have."""

_PLACES = ("near", "behind", "above", "beside", "in front of", "next to", "under")
_ADJECTIVES = "big small old new good bad long short red white different important".split()
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_FILLERS = "a b c x y z i n 0 1 2".split()
_LARGEST_NUMBER = 30
_WORDS = 5, 10
"""Fewest and most words that `copying` repeats."""


def agreement(rng: np.random.Generator, tokens: int) -> tuple[str, list[str]]:
    """Draws a subject, and a noun between it and its verb whose number may differ.

    See Linzen et al. (arXiv 1611.01368): the verb agrees with the first noun.
    """
    subject, other = rng.choice(list(NOUNS), 2, replace=False)
    one, other_one = rng.integers(2, size=2).astype(bool)
    place, adjective = rng.choice(_PLACES), rng.choice(_ADJECTIVES)
    words = [
        noun if single else NOUNS[noun] for noun, single in ((subject, one), (other, other_one))
    ]
    verbs = (" is", " are") if one else (" are", " is")
    return f"The {words[0]} {place} the {words[1]}", [f"{verb} {adjective}." for verb in verbs]


def copying(rng: np.random.Generator, tokens: int) -> tuple[str, list[str]]:
    """Draws words that are written twice, the second time up to the word that is asked for."""
    count = int(np.clip(tokens // 6, *_WORDS))
    words = rng.choice(list(NOUNS), count, replace=False).tolist()
    place = int(rng.integers(1, count))
    # Neither the answer nor the word in front of it, with which the context ends.
    others = [word for i, word in enumerate(words) if i not in (place, place - 1)]
    choices = [words[place], *rng.choice(others, min(3, len(others)), replace=False).tolist()]
    return " ".join(words + words[:place]), [f" {word}" for word in choices]


def brackets(rng: np.random.Generator, tokens: int) -> tuple[str, list[str]]:
    """Draws nested brackets, some of them closed; asked is what closes the last open one."""
    text, open_ones = "", list[str]()
    for _ in range(int(np.clip(tokens // 4, 4, 12))):
        if open_ones and rng.random() < 0.4:
            text += _BRACKETS[open_ones.pop()]
        else:
            open_ones.append(str(rng.choice(list(_BRACKETS))))
            text += open_ones[-1]
        text += str(rng.choice(_FILLERS))
    # All are closed, so one more is opened: there is always something to close.
    if not open_ones:
        open_ones.append("(")
        text += "(" + str(rng.choice(_FILLERS))
    right = _BRACKETS[open_ones[-1]]
    return text, [right, *(closing for closing in _BRACKETS.values() if closing != right)]


def arithmetic(rng: np.random.Generator, tokens: int) -> tuple[str, list[str]]:
    """Draws a sum or a difference of two numbers up to 30; the others are near the result."""
    # The larger one first, so that no difference is negative.
    first, second = sorted(rng.integers(_LARGEST_NUMBER + 1, size=2).tolist(), reverse=True)
    if rng.random() < 0.5:
        result, sign = first - second, "-"
    else:
        result, sign = first + second, "+"
        if rng.random() < 0.5:
            first, second = second, first
    near = [n for n in range(result - 4, result + 5) if n >= 0 and n != result]
    others = rng.choice(near, 3, replace=False).tolist()
    return f"{first} {sign} {second} =", [f" {number}" for number in (result, *others)]


RULES: dict[str, Draw] = {
    draw.__name__: draw for draw in (agreement, copying, brackets, arithmetic)
}


def draw_items(
    draw: Draw, tokens: int, count: int, examples: int, seed: int
) -> tuple[list[Item], list[Item]]:
    """Returns up to `count` items, and up to `examples` others; no two are the same question.

    Args:
      draw: a task of this module.
      tokens: most tokens of an item, roughly: the rule's words are short.
      seed: the same seed returns the same items.
    """
    rng = np.random.default_rng(seed)
    items: dict[str, Item] = {}
    for _ in range(_ATTEMPTS * (count + examples)):
        if len(items) == count + examples:
            break
        context, choices = draw(rng, tokens)
        # Choice 0 is the right one, so its new place is where `order` is 0.
        order = rng.permutation(len(choices))
        shuffled = tuple(choices[i] for i in order)
        items.setdefault(context, Item(context, shuffled, int(np.argmin(order)), str(len(items))))
    drawn = list(items.values())
    return drawn[examples:], drawn[:examples]
