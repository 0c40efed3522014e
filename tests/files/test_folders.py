"""Two processes claim a folder at once."""

import errno
import os

import pytest

from sparse_dataflow.files import folders
from sparse_dataflow.files.errors import UserError


@pytest.mark.parametrize("other", ["looks", "is faster"])
def test_a_process_of_the_same_owner_never_sees_half_a_mark(tmp_path, monkeypatch, other):
    folder, text, meanwhile = tmp_path / "cache", folders._text, []

    def text_while_another_process_looks(owner):
        if not meanwhile:
            meanwhile.append("once")
            act = folders.claim if other == "is faster" else folders.refuse_foreign
            act(folder, "data cache")
        return text(owner)

    monkeypatch.setattr(folders, "_text", text_while_another_process_looks)
    undo = folders.claim(folder, "data cache")
    assert meanwhile and os.listdir(folder) == [folders.MARK]
    assert folders.is_marked(folder, "data cache")
    undo()
    assert folder.exists() == (other == "is faster")


def test_a_file_system_without_links_has_marks_too(tmp_path, monkeypatch):
    def link(*_):
        raise OSError(errno.ENOTSUP, "no links")

    monkeypatch.setattr(os, "link", link)
    folders.claim(tmp_path / "a", "data cache")
    assert os.listdir(tmp_path / "a") == [folders.MARK]
    assert folders.is_marked(tmp_path / "a", "data cache")


def test_a_mark_that_a_killed_process_did_not_finish_is_no_foreign_file(tmp_path):
    (tmp_path / f"{folders.MARK}.0f").write_text("written by")
    folders.claim(tmp_path, "data cache", names={"locks"})
    folders.claim(tmp_path, "data cache", names={"locks"})
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(UserError, match="mine"):
        folders.claim(tmp_path, "data cache", names={"locks"})


def test_an_error_that_quotes_a_huge_argument_keeps_its_ends():
    text = str(UserError(f"--mesh={'9' * 10_000} is no axis; legal: data, tensor."))
    assert text.startswith("--mesh=99") and text.endswith("legal: data, tensor.")
    assert len(text) < 2100
