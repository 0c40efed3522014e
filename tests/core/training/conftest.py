"""Lets the tests of training import each other (test_transitions)."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
