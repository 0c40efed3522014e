"""Secrets are removed, and nothing else changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.files.errors import redact, redact_json

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
