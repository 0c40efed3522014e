"""The process that renders templates: limits, restarts, forks, threads, no child left behind."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from marks import some

from sparse_dataflow.data import template_child, template_sandbox
from sparse_dataflow.files.errors import UserError

GREETING = "{{ word }}!"


def child():
    """Returns the id of the child of this process, which renders something first."""
    template_sandbox.render(GREETING, {"word": "a"})
    return template_sandbox._CHILD._process.pid


@pytest.mark.parametrize("word", ["é", "\ud800", "a\nb\x00", "😀" * 100_000, ""])
def test_any_text_comes_back_as_it_was(word):
    assert template_sandbox.render(GREETING, {"word": word}) == f"{word}!"


@pytest.mark.parametrize(
    "text",
    some(
        {
            "one string": "{{ 'x'.center(9 * 10**9) }}",
            "a list": "{% set n = namespace(x=['ab']) %}{% for i in range(50) %}"
            "{% set n.x = n.x * 2 %}{% endfor %}",
            "a tree": "{% set n = namespace(x=(1,)) %}{% for i in range(50) %}"
            "{% set n.x = (n.x, n.x) %}{% endfor %}{{ n.x|pprint }}",
            "a filter": "{{ ('a' * 10**7)|urlize * 100 }}",
            "two filters": "{{ (('a' * 99999) ~ '!')|wordwrap(1)|replace('a', 'b' * 9999) }}",
        },
        "one string", "a tree",
    ),
)  # fmt: skip
def test_what_takes_too_much_is_refused_and_the_next_template_renders(text):
    with pytest.raises(template_sandbox.LimitExceeded, match="it takes more than"):
        template_sandbox.render(text, {})
    assert template_sandbox.render(GREETING, {"word": "next"}) == "next!"


@pytest.mark.parametrize("kind", ["for", "with loop variables", "inner"])
def test_rounds_of_loops_are_counted_alike_on_every_machine(kind):
    template = {
        "for": "{% for i in range(n) %}{% endfor %}",
        "with loop variables": "{% for i in range(n) %}{% if loop.last %}{{ loop.length }}"
        "{% endif %}{% endfor %}",
        "inner": "{% for i in range(n // 1001) %}{% for j in range(1000) %}{% endfor %}"
        "{% endfor %}",
    }[kind]
    most = template_child.MOST_ROUNDS
    values = {"n": most - most % 1001 if kind == "inner" else most}
    assert template_sandbox.render(template, values) in ("", str(most))
    with pytest.raises(UserError, match=r"rounds of loops|too big"):
        template_sandbox.render(template + "{% for i in [1] * 1001 %}{% endfor %}", values)


def test_a_template_sees_neither_the_environment_nor_files(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "made-up-secret-of-this-test")
    variables = psutil.Process(child()).environ()
    assert "A_TOKEN" not in variables and "HOME" not in variables
    for text in (
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ self.__class__.__mro__ }}",
    ):
        with pytest.raises(UserError):
            template_sandbox.render(text, {})


def test_a_child_that_was_killed_is_started_again():
    first = child()
    os.kill(first, signal.SIGKILL)
    assert child() != first


def test_memory_is_bounded_where_the_system_has_no_limit():
    one = template_sandbox._Child(2**60)  # No limit of the operating system in effect.
    one.answer("render", GREETING, True, "", {"word": "a"})
    one._memory = 2**27
    text = "{% for i in range(99) %}{% set x = ('%s' % i) * 10**8 %}{{ x }}{% endfor %}"
    with pytest.raises(template_sandbox.LimitExceeded, match="128 MiB"):
        one.answer("render", text, True, "", {})
    assert one._process is None


@pytest.mark.parametrize("pattern", [r"(\w)(\d)?", "b+", "", "(?P<a>a)|(c)"])
def test_an_expression_finds_what_re_finds(pattern):
    text, ours = "ab1 bbé\n", template_sandbox.Regex(pattern, re.IGNORECASE)
    theirs = re.compile(pattern, re.IGNORECASE)
    assert ours.findall(text) == theirs.findall(text)
    assert ours.split(text) == theirs.split(text)
    assert ours.sub(r"<\g<0>>", text, 2) == theirs.sub(r"<\g<0>>", text, 2)


def test_an_expression_without_end_is_ended():
    with pytest.raises(template_sandbox.LimitExceeded):
        template_sandbox.Regex("(?:.|.)*Z").findall("x" * 60)
    with pytest.raises(UserError, match="unterminated"):
        template_sandbox.Regex("(")


def test_threads_get_the_answers_to_their_own_requests():
    wrong = []

    def work(name):
        for number in range(50):
            word = f"{name}-{number}" * (1 + number * 100)
            if template_sandbox.render(GREETING, {"word": word}) != f"{word}!":
                wrong.append(word)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_fork_renders_in_a_child_of_its_own():
    first = child()
    fork = os.fork()
    if not fork:
        try:
            os._exit(0 if child() != first else 1)
        finally:
            os._exit(2)
    assert os.waitpid(fork, 0)[1] == 0
    assert child() == first


@pytest.mark.parametrize("end", ["exit", "kill", "error"])
def test_no_child_outlives_its_process(end, tmp_path):
    last = {"exit": "", "kill": "os.kill(os.getpid(), 9)", "error": "1 / 0"}[end]
    program = (
        "import os\nfrom sparse_dataflow.data import template_sandbox as box\n"
        "box.render('a', {}); print(box._CHILD._process.pid, flush=True)\n" + last
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    number, end = int(done.stdout), time.monotonic() + 20
    while psutil.pid_exists(number) and psutil.Process(number).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_child_imports_nothing_of_this_package():
    program = f"import runpy, sys; runpy.run_path({template_child.__file__!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    modules = {name.partition(".")[0] for name in done.stdout.split()}
    assert "jinja2" in modules and not modules & {"sparse_dataflow", "jax", "numpy"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a: 1\nb: [x, 2.5, true]\n", {"a": 1, "b": ["x", 2.5, True]}),
        (b"a: &x [1]\nb: *x\n", {"a": [1], "b": [1]}),
        ("a: é\nd: 2001-02-03".encode(), {"a": "é", "d": "2001-02-03"}),
        (b"a: !function x.y", {"a": {template_child.CODE: "x.y"}}),
        (b"", None),
    ],
)
def test_yaml_is_read(content, expected):
    assert template_sandbox.yaml_value(content) == expected


@pytest.mark.parametrize(
    "content",
    [
        b"a: !!python/object/apply:os._exit [7]",
        b"[" * 100_000,
        "\n".join(
            ["a0: &a0 [1, 1]", *(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]" for n in range(60))]
        ).encode(),
        b"a: &a [*a]",
        b"#" * (2**20 + 1),
        b"\xff\xfe\x00",
        b"a: {b",
    ],
)
def test_yaml_of_python_objects_or_that_has_no_end_is_refused(content):
    with pytest.raises(UserError):
        template_sandbox.yaml_value(content)
