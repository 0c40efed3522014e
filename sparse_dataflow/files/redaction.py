"""Removes secrets from printed and written text.

A secret is a password or token inside a URL, or the value of an environment variable whose name
says so, such as HF_TOKEN. A user may put either into a command by mistake; its errors, config.json
and report then show `***`.
"""

import functools
import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|KEY|APIKEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH)(_|$)", re.I
)
_SHORTEST = 8  # Shorter values are no secrets; replacing them would remove ordinary words.
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s:]*:[^/@\s]*(?=@)|(?<=://)[^/@\s:]{8,}(?=@)")
_IN_QUERY = re.compile(
    r"(?i)([?&;](?:[\w.-]*(?:token|key|secret|password|passwd|signature|sig|credential)[\w.-]*)=)"
    r"[^&;#\s'\"]+"
)


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Replaces the secrets in a text by `***`."""
    for value in _values(tuple(sorted(environment.items()))):
        text = text.replace(value, HIDDEN)
    return _IN_QUERY.sub(rf"\1{HIDDEN}", _IN_ADDRESS.sub(HIDDEN, text))


def redact_json(value: Any) -> Any:
    """Applies `redact` to every string in a JSON value; field names stay."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {name: redact_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [redact_json(each) for each in value]
    return value


@functools.lru_cache(4)
def _values(environment):
    """Returns the values of secret variables, longest first: one may contain another."""
    secrets = {
        value
        for name, value in environment
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST and not os.path.exists(value)
    }
    return sorted(secrets, key=len, reverse=True)
