"""What takes long says so."""

import logging
import time

from sparse_dataflow.files import storage


def test_a_block_that_takes_long_is_told_and_a_short_one_is_not(caplog, monkeypatch):
    monkeypatch.setattr(storage, "SECONDS", 0.05)
    with caplog.at_level(logging.INFO), storage.told("reading the short file"):
        pass
    with caplog.at_level(logging.INFO), storage.told("reading the long file"):
        while not caplog.records:
            time.sleep(0.01)
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0].startswith("still reading the long file after 0 s")
