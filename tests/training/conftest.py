"""Lets the tests of training import what they share (checkpoint_states)."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
