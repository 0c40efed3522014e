"""Secrets are removed, and nothing else changes."""

import html
import json
import os
import shlex
import sys
import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.files import json_files, storage
from sparse_dataflow.files.errors import (
    UserError,
    escaped,
    first_line,
    printable,
    redact,
    redact_json,
    refuse_secrets,
)

WORDS = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=8, max_size=30)


@given(
    WORDS,
    st.sampled_from(["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "DB_PASSWORD", "KEY"]),
    st.text(max_size=20),
    st.text(max_size=20),
)
def test_the_value_of_a_secret_variable_is_nowhere(secret, name, before, after):
    assert secret not in redact(f"{before}{secret}{after}", {name: secret, "HOME": "/root/home"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:hunter22@host/x", "https://***@host/x"),
        ("git+ssh://ghp_0123456789abcdef@host", "git+ssh://***@host"),
        ("gs://b/x?X-Goog-Signature=abc123&y=1", "gs://b/x?X-Goog-Signature=***&y=1"),
        ("http://h/?token=abc#part", "http://h/?token=***#part"),
        ("--corpus=s3://me:pw@h/a b", "--corpus=s3://***@h/a b"),
    ],
)
def test_passwords_and_tokens_in_addresses_are_hidden(text, expected):
    assert redact(text, {}) == expected
    assert redact_json({"flags": [text, 1, None]}) == {"flags": [expected, 1, None]}


@given(st.text(st.characters(exclude_characters=":?&;="), max_size=60))
def test_all_else_stays(text):
    environment = {"HF_TOKEN": "short", "PATH": text, "MONKEY": "a long enough value"}
    assert redact(text, environment) == text
    assert redact("a long enough value", environment) == "a long enough value"


SECRETS = """
DATABASE_PASSWORDS PGPASSWORD REDIS_AUTH SENTRY_DSN POSTGRES_DSN SLACK_WEBHOOK_URL GITLAB_PAT
MYJWT_JWT OAUTH NPM_CONFIG__AUTHTOKEN AZURE_CLIENT_SECRET DOCKER_AUTH API_KEYS OPENAI_API_KEY2
apikey ssh_private_key DBPWD SMTP_PASS AWS_ACCESS_KEY_ID SERVICE_CREDENTIALS LOGIN_COOKIES
BEARER URL_SIGNATURE STORAGE_CONNECTIONSTRING MFA_OTP SPARSE_DATAFLOW_TOKEN
HUGGING_FACE_HUB_TOKEN TOTP PASSPHRASE SLURM_JWT
""".split()
HARMLESS = {
    "USER": "alexander99",
    "LOGNAME": "maximiliane",
    "LANG": "en_US.UTF-8",
    "TERM": "xterm-256color",
    "HOSTNAME": "gpu-node-17.cluster.example",
    "TOKENIZERS_PARALLELISM": "something",
    "SSH_TTY": "/dev/pts/0",
    "CONDA_DEFAULT_ENV": "sparse_training",
    "MONKEY": "bananas and apples",
    "CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "KEYBOARD": "qwertz-layout",
    "XLA_FLAGS": "--xla_dump_to=/somewhere/else",
    "HOST": "x86_64-conda-linux-gnu",
    "SHLVL": "12345678",
    "COMPASS": "north-west",
    "BYPASS": "no-bypass-here",
    "GIT_AUTHOR_NAME": "Ada Lovelace",
    "DESKTOP_SESSION": "ubuntu-xorg",
    "PATTERN": "checkerboard",
    "SASSAFRAS": "a small tree",
    "JAX_COMPILATION_CACHE_DIR": "/a/b/c/d/e",
    "NOTEBOOK": "training.ipynb",
    "N": "1",
    "DEBUG": "true",
}


@pytest.mark.parametrize("name", SECRETS)
def test_usual_names_of_secrets_are_known(name):
    assert redact("x some-value-9 y", {name: "some-value-9"}) == "x *** y"


def test_ordinary_values_stay():
    text = " ".join([*HARMLESS.values(), "training of 1 model is true, en_US, 12345678 steps"])
    assert redact(text, HARMLESS) == text
    assert redact("it is true: 1 of en_US", {"A_TOKEN": "true", "B_KEY": "1", "PW": "en_US"})


@pytest.mark.parametrize(
    "value",
    [
        "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
        "0123456789abcdef" * 2,
        "hf_AbCdEfGhIjKlMnOpQr0123456",
    ],
)
def test_what_looks_as_a_token_is_hidden_under_any_name(value):
    assert redact(f"a {value} b", {"MY_THING": value}) == "a *** b"


FORMS = {
    "JSON": lambda text: json.dumps(text)[1:-1],
    "JSON in Unicode": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "Python": lambda text: repr(text)[1:-1],
    "HTML": html.escape,
    "an address": lambda text: urllib.parse.quote(text, safe=""),
    "a path of an address": urllib.parse.quote,
    "a form": urllib.parse.quote_plus,
    "a command": lambda text: shlex.quote(text).strip("'"),
}


@pytest.mark.parametrize("form", FORMS)
@given(
    st.text(
        st.characters(codec="ascii", exclude_characters="'\n\r\x0b\x0c\x1c\x1d\x1e"), min_size=8
    )
)
def test_a_secret_is_hidden_in_every_form(form, value):
    value = value.strip()
    # Hypothesis draws constants of our own code too, such as /dev/null, and a file is no secret.
    if len(value) >= 8 and not value.startswith("-----") and not os.path.exists(value):
        assert FORMS[form](value) not in redact(f"({FORMS[form](value)})", {"A_TOKEN": value})


def test_each_line_of_a_private_key_is_hidden():
    key = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg\nkqhkiG9w0BAQEF\n-----END PRIVATE KEY-----\n"
    shown = redact(f"bad key {key!r} or kqhkiG9w0BAQEF", {"TLS_PRIVATE_KEY": key})
    assert "MIIEvQ" not in shown and "kqhk" not in shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mysql://root:a@b:c@d@db:3306/x and me@x.org", "mysql://***@db:3306/x and me@x.org"),
        ("https://user:my pass word@host/x y", "https://***@host/x y"),
        ("redis://:s3cr/et@cache:6379/0", "redis://***@cache:6379/0"),
        ('{"a":"https://u:pw@h","b":"me@x.org"}', '{"a":"https://***@h","b":"me@x.org"}'),
        ("http://host:8080/a@b stays", "http://host:8080/a@b stays"),
        ("http://127.0.0.1:6006, mail me@x.org", "http://127.0.0.1:6006, mail me@x.org"),
        ("hf://datasets/o/n@main/a.json", "hf://datasets/o/n@main/a.json"),
        ("http://[::1]:8080/x@y", "http://[::1]:8080/x@y"),
        ("Authorization: Bearer abc.def-123456", "Authorization: Bearer ***"),
        ("https://h/x?sv=1&sig=ab%2Fc&pwd=x1", "https://h/x?sv=1&sig=***&pwd=***"),
    ],
)
def test_all_up_to_the_last_at_sign_of_an_address_is_hidden(text, expected):
    assert redact(text, {}) == expected


@given(st.text(st.characters(exclude_characters="\r")))
def test_text_for_a_terminal_has_no_control_characters(text):
    shown = printable(text)
    assert all(c.isprintable() or c in "\n\t" for c in shown)
    assert shown.count("\n") == text.count("\n")
    if all(c.isprintable() or c in "\n\t\xa0" for c in text):
        assert shown == text.replace("\xa0", " ")


@pytest.mark.parametrize("text", ["\x1b[2J", "a\x9b31mb", "\x1b]0;title\x07", "\u202eabc", "a\rb"])
def test_escapes_of_a_terminal_are_shown(text):
    assert printable(text) == escaped(text) and printable(text).isprintable()
    assert str(UserError(text)).isprintable()


HOSTILE = ["://a:", "://a: ", "://a:\n", "?key", ";token=", "basic ", "://", "@://b:c", "ü://d:e"]


@pytest.mark.parametrize("text", HOSTILE)
def test_the_time_to_hide_secrets_grows_with_the_text_and_not_faster(text):
    def steps(count):
        tracer, seen = sys.gettrace(), 0

        def count_lines(frame, event, argument):
            nonlocal seen
            seen += event == "line"
            return count_lines

        sys.settrace(count_lines)
        try:
            redact(text * count, {})
        finally:
            sys.settrace(tracer)
        return seen

    assert steps(2000) <= 2.5 * steps(1000) + 100
    assert redact(text * 200_000, {}) is not None  # A square of this would take minutes.


@pytest.mark.parametrize("distance", [0, 5, 900, 999, 1000, 1001, 3000])
@pytest.mark.parametrize("secret", ["https://me:hunter2222@host", "hunter2222-in-the-environment"])
def test_a_cut_never_shows_a_part_of_a_secret(monkeypatch, secret, distance):
    monkeypatch.setenv("A_TOKEN", "hunter2222-in-the-environment")
    filler = "x " * 100_000
    for text in (filler[:distance] + secret + filler, filler + secret + " y"[:1] * distance):
        assert "hunter" not in str(UserError(text)) and len(str(UserError(text))) < 2100
        assert "hunter" not in first_line(ValueError(text))


@pytest.mark.parametrize("word", ["training1", "postgres"])
def test_what_is_read_again_is_stored_as_it_is_or_refused(monkeypatch, tmp_path, word):
    monkeypatch.setenv("DB_PASSWORD", word)
    place = tmp_path / word / "corpus"
    place.mkdir(parents=True)
    fields = {word: 1, "data": {"corpus": [str(place), str(place.parent / "new")]}}
    refuse_secrets(fields)
    path = tmp_path / "settings.json"
    storage.replace_text(path, json.dumps(fields))
    assert json_files.load(path) == fields
    with pytest.raises(UserError, match=r"^data\.corpus holds the value of the variable DB_PASS"):
        refuse_secrets({"data": {"corpus": f"hf:me/{word}"}})
    with pytest.raises(UserError, match=r"^run\.mirror holds a password"):
        refuse_secrets({"run": {"mirror": "s3://me:pw@host/x"}})
