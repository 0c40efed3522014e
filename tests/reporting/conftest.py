"""Lets the tests of the report import what they share (report_sample, printed)."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
