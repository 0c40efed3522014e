"""Prose and Python sources that real models are pruned and scored on.

The prose is the English text of the Debian package `debian-handbook`, which apt-get downloads; its
license is GPL 2 or later, or CC BY-SA 3.0.  Two of three pages are for calibration, the others are
held out.  The sources are the corpus `python_stdlib` with its own held-out files.
"""

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np

from sparse_dataflow.data import cache
from sparse_dataflow.data.corpora import load_corpus

HANDBOOK = "debian-handbook"
PAGES = "usr/share/doc/debian-handbook/html/en-US"
WIDTH = 512
"""Tokens of a row."""

_BLOCKS = re.compile(r"h[1-6]|div|p|li|dt|dd|pre|tr|table|ul|ol|title")
_SILENT = {"head", "script", "style"}


class _Text(HTMLParser):
    """Text of a page of the handbook, a paragraph a line, without its navigation."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.lines, self._silent, self._depth = [""], 0, 0

    def handle_starttag(self, tag, attrs):
        if tag in ("meta", "link", "img", "br", "input", "hr", "col"):
            return
        names = dict(attrs).get("class") or ""
        navigation = "docnav" in names or dict(attrs).get("id") in ("title", "banner")
        if self._silent or tag in _SILENT or navigation:
            self._silent += 1
        elif _BLOCKS.fullmatch(tag):
            self.lines.append("")

    def handle_startendtag(self, tag, attrs):
        """An element without content."""

    def handle_endtag(self, tag):
        if self._silent:
            self._silent -= 1
        elif _BLOCKS.fullmatch(tag):
            self.lines.append("")

    def handle_data(self, data):
        if not self._silent:
            self.lines[-1] += data


def page_text(html):
    """Returns the text of a page."""
    parser = _Text()
    parser.feed(html)
    lines = (" ".join(line.split()) for line in parser.lines)
    return "\n".join(filter(None, lines)) + "\n"


def prose(folder):
    """(calibration texts, held-out texts) of the handbook, which is downloaded into a folder."""
    folder = Path(folder)
    pages = folder / HANDBOOK / PAGES
    if not pages.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "--quiet", HANDBOOK], cwd=folder, check=True)
        (package,) = folder.glob(f"{HANDBOOK}_*.deb")
        subprocess.run(["dpkg-deb", "--extract", package, folder / HANDBOOK], check=True)
    texts = [page_text(path.read_text("utf-8")) for path in sorted(pages.glob("*.html"))]
    texts = [text for text in texts if len(text) > 1000]
    return [t for i, t in enumerate(texts) if i % 3 < 2], texts[2::3]


def code():
    """(calibration texts, held-out texts) of Python sources."""
    corpus = load_corpus("python_stdlib", cache.FOLDER)
    return tuple([document.text for document in side] for side in (corpus.train, corpus.validation))


def rows_of(tokenizer, texts, tokens, seed=0):
    """int32 [rows, WIDTH] of drawn places, each of a text that is drawn by its length."""
    rng = np.random.default_rng(seed)
    ids = np.concatenate([tokenizer.encode(texts[i]) for i in rng.permutation(len(texts))[:150]])
    starts = rng.permutation(len(ids) // WIDTH)[: tokens // WIDTH] * WIDTH
    return np.stack([ids[start : start + WIDTH] for start in np.sort(starts)]).astype(np.int32)
