"""Where the checkout is: every other file of the tests asks here, so a test may move folders."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
