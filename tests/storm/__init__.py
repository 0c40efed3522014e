"""A storm of combinations: it draws legal runs from the table of settings, and checks relations
between them that need no expected value.

`make storm` starts it; docs/developing.md explains it.  `python -m storm --help` lists the flags.
"""

import pathlib
import sys

TESTS = pathlib.Path(__file__).parents[1]

# Helpers that tests of several folders have.
for folder in ("experiments", "interchange", "."):
    if str(place := (TESTS / folder).resolve()) not in sys.path:
        sys.path.insert(0, str(place))
