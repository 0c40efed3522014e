"""Secrets kept out of what is printed and written.

A secret is a password or token inside an address, and the value of any environment variable whose
name says that it is one.  Whoever runs a command may put either into it by mistake; its error, its
config.json and its report then show `***`.
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
_SHORTEST = 8  # Shorter values are no secrets, and would blot out words.
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s:]*:[^/@\s]*(?=@)|(?<=://)[^/@\s:]{8,}(?=@)")
_IN_QUERY = re.compile(
    r"(?i)([?&;](?:[\w.-]*(?:token|key|secret|password|passwd|signature|sig|credential)[\w.-]*)=)"
    r"[^&;#\s'\"]+"
)


def redacted(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """The text with `***` in the place of secrets."""
    for value in _values(tuple(sorted(environment.items()))):
        text = text.replace(value, HIDDEN)
    return _IN_QUERY.sub(rf"\1{HIDDEN}", _IN_ADDRESS.sub(HIDDEN, text))


def redacted_json(value: Any) -> Any:
    """A JSON value whose texts are `redacted`; names of fields stay."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {name: redacted_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_json(each) for each in value]
    return value


@functools.lru_cache(4)
def _values(environment):
    """Values of secret variables, longest first, so that one inside another goes with it."""
    found = {
        value
        for name, value in environment
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST and not os.path.exists(value)
    }
    return sorted(found, key=len, reverse=True)
