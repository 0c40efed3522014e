"""Items that are drawn from a rule have one right choice, found here in another way."""

import ast
import re

import numpy as np
import pytest

from sparse_dataflow.evaluation.tasks import builtin, generated

COUNT = 500
SHORT, LONG = 16, 128


def agrees(context, choice):
    """Whether a verb has the number of the first noun."""
    first = re.match(r"The (\w+) ", context)[1]
    return choice.startswith(" is" if first in generated.NOUNS else " are")


def copies(context, choice):
    """Whether a word follows in the first half what precedes it in the second."""
    words = context.split()
    return words[words.index(words[-1]) + 1] == choice.strip()


def closes(context, choice):
    """Whether a bracket leaves fewer open ones, by removing pairs."""
    text = re.sub(r"\w", "", context)
    while text != (text := re.sub(r"\(\)|\[\]|\{\}", "", text)):
        pass
    return text[-1] + choice in ("()", "[]", "{}")


def equals(context, choice):
    first, sign, second = context.removesuffix(" =").split()
    values = ast.literal_eval(first), ast.literal_eval(second)
    return int(choice) == (sum(values) if sign == "+" else values[0] - values[1])


IS_RIGHT = {"agreement": agrees, "copying": copies, "brackets": closes, "arithmetic": equals}


CHOICES = {"agreement": 2, "copying": 4, "brackets": 3, "arithmetic": 4}


def test_every_rule_is_checked_here():
    assert set(IS_RIGHT) == set(generated.RULES) < set(builtin.BUILTIN_TASKS)


@pytest.mark.parametrize("tokens", [SHORT, LONG])
@pytest.mark.parametrize("name", IS_RIGHT)
def test_one_choice_is_right(name, tokens):
    draw = generated.RULES[name]
    items, examples = generated.draw_items(draw, tokens, COUNT, builtin.EXAMPLES, seed=5)
    assert (len(items), len(examples)) == (COUNT, builtin.EXAMPLES)
    for item in items + examples:
        right = [IS_RIGHT[name](item.context, choice) for choice in item.choices]
        assert np.flatnonzero(right).tolist() == [item.answer], item
        assert len(set(item.choices)) == len(item.choices) == CHOICES[name]


@pytest.mark.parametrize("name", IS_RIGHT)
def test_no_question_is_asked_twice_and_no_place_is_preferred(name):
    draw = generated.RULES[name]
    items, examples = generated.draw_items(draw, LONG, COUNT, builtin.EXAMPLES, seed=1)
    questions = [item.context for item in items + examples]
    assert len(set(questions)) == len(questions)
    choices = len(items[0].choices)
    counts = np.bincount([item.answer for item in items], minlength=choices)
    # Five standard deviations of a fair choice.
    assert abs(counts - COUNT / choices).max() < 5 * np.sqrt(COUNT / choices)


@pytest.mark.parametrize("name", IS_RIGHT)
def test_the_seed_alone_decides(name, prose, tokenizer):
    first, again = (builtin.make_items(name, prose, tokenizer, 96, 9, 2) for _ in range(2))
    assert first == again
    assert builtin.make_items(name, prose, tokenizer, 96, 9, 3) != first


@pytest.mark.parametrize("name", ["agreement", "copying"])
def test_a_surface_cue_gives_chance(name):
    """The number of the nearest noun, and the first word, tell nothing."""
    items, _ = generated.draw_items(generated.RULES[name], LONG, COUNT, 0, seed=2)
    if name == "agreement":
        cue = [" is" if i.context.split()[-1] in generated.NOUNS else " are" for i in items]
    else:
        cue = [f" {item.context.split()[0]}" for item in items]
    share = np.mean([i.choices[i.answer].startswith(c) for i, c in zip(items, cue)])
    assert share < 0.6 if name == "agreement" else share < 0.35


def test_a_rule_with_few_questions_ends():
    items, examples = generated.draw_items(
        lambda rng, _: (str(rng.integers(3)), ["a", "b"]), 8, 9, 2, 0
    )
    assert (len(items), len(examples)) == (1, 2)
