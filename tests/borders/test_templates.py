"""A chat template that somebody else wrote renders, or is refused, soon."""

import drawn
import pytest
from drawn_inputs import DrawnInputs, no_hang
from marks import some

from sparse_dataflow.data.chat import ChatTemplate
from sparse_dataflow.files.errors import UserError

MESSAGES = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}] * 2

ENDLESS = [
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = [n.x, n.x]|join %}"
    "{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x.replace('a', 'aa') %}"
    "{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x|replace('', 'aa') %}"
    "{% endfor %}",
    "{% set x = 'a' * 999999 %}{% for i in range(9999) %}{{ x }}{% endfor %}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ 10 ** (10 ** (10 ** 10)) }}",
    "{{ [1] * 10 ** 10 }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ 'a'.ljust(10 ** 10) }}",
    "{{ 'a'|center(10 ** 10) }}",
    "{{ '{:9999999999}'.format(1) }}",
    "{{ '%*d' % (10 ** 9, 1) }}",
    "{{ range(10 ** 9)|list }}",
    "{{ '{:{}}'.format(1, 10 ** 10) }}",
    "{{ messages|tojson(indent=10 ** 9) }}",
    "{{ [1]|batch(10 ** 9, 2)|list }}",
    "{{ lipsum(10 ** 9) }}",
    "{{ [1]|slice(10 ** 9)|list }}",
    "{{ '%9999999999d'|format(1) }}",
    "{{ (1).__class__.__mro__ }}",
    "{{ 'a'|wordwrap(10 ** 9, wrapstring='a' * 10 ** 9) }}",
    "(" * 500,
    "{{ " + "(" * 5000,
]
"""Templates that take minutes or gigabytes without a bound, or leave the sandbox."""

SLOW = {1, 7, 11, 22, 23}
"""Numbers of those that only the limit of processor time ends."""


@pytest.mark.parametrize(
    "text", some(dict(enumerate(ENDLESS)), *({*range(len(ENDLESS))} - SLOW), min(SLOW))
)
def test_a_template_without_end_is_refused(text):
    with no_hang():
        if text == "(" * 500:
            assert ChatTemplate(text).render(MESSAGES) == text
            return
        with pytest.raises(UserError, match="cannot render this"):
            ChatTemplate(text).render(MESSAGES)


USUAL = (
    "{{ bos_token }}{% for m in messages %}{% if loop.first %}[{% endif %}<|{{ m['role'] }}|>"
    "{{ m['content'] | trim ~ '\\n' }}{% set x = 'a' + m.role %}{% generation %}{{ x * 2 }}"
    "{% endgeneration %}{{ '%02d' % 7 }}{{ '{}-{:>3}'.format(1, 2) }}{{ x.replace('a', 'b') }}"
    "{{ m | tojson(indent=2) }}{{ m.items() | list | length }}{% endfor %}"
    "{% macro f(a) %}{{ a|upper }}{% endmacro %}{{ f('x') }}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def test_usual_templates_render_as_in_a_plain_sandbox():
    import jinja2.sandbox

    from sparse_dataflow.data.template_child import CLOSE, OPEN, _Generation, _to_json

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    values = {"messages": MESSAGES, "bos_token": "<s>", "add_generation_prompt": True}
    marked = environment.from_string(USUAL).render(**values)
    expected = marked.replace(OPEN, "").replace(CLOSE, "")
    template = ChatTemplate(USUAL, (("bos_token", "<s>"),))
    for _ in range(2):
        assert template.render(MESSAGES, prompt=True) == expected


def test_a_foreign_template_renders_or_is_refused():
    pieces = [
        *(text for number, text in enumerate(ENDLESS) if number not in SLOW),
        "{%",
        "%}",
        "{{",
        "}}",
        "{#",
        "{% endfor %}",
        "{% if 1 %}",
        "{% endif %}",
        "{{ x.y.z }}",
        "{{ messages[9] }}",
        "{{ raise_exception('\x1b[2J\\nno') }}",
        "{{ 1 / 0 }}",
        "{% break %}",
        "{% include 'a' %}",
        "{% import 'a' as b %}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler(1).next() }}",
        "{% raw %}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "\x00",
        "é\ud800",
    ]
    counts = DrawnInputs("templates")
    for _ in counts:
        draw = counts.draw
        text = USUAL
        for _ in range(draw.randint(0, 3)):
            place = draw.choice([text.find("{", draw.randint(0, len(text))), len(text), 0])
            place = max(0, place)
            text = text[:place] + draw.choice(pieces) + text[place + draw.choice([0, 0, 5]) :]
        if draw.random() < 0.2:
            text = drawn.damaged(draw, text.encode(errors="replace")).decode(errors="replace")
        with counts.one(text):
            ChatTemplate(text, (("bos_token", drawn.text(draw)),)).answers(MESSAGES)
