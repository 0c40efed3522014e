import dataclasses
import errno
import html.parser
import json
import math
import os
import re

import pytest
import report_sample
from hypothesis import given, settings
from hypothesis import strategies as st
from parsed import parse
from report_sample import bare

from sparse_dataflow.files import console
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.reporting import page, quantities
from sparse_dataflow.reporting.report import write_report
from sparse_dataflow.reporting.report_data import Continuation, LayoutData, ProfileData, ReportData

VOID = {"meta", "br", "hr", "img", "input", "link", "base", "wbr", "source", "area", "col"}


class Page(html.parser.HTMLParser):
    """A parsed page; asserts that its elements nest.

    Attributes:
      elements: (tag, attributes) of each element.
      text: texts outside figures.
      outside_pre: texts outside `pre` elements.
      figure_text: texts in figures.
      pre: exact content of each `pre` element.
      rows: measure -> its cells in the headline table.
      small: measure -> small print of its cells.
    """

    def __init__(self, text: str):
        super().__init__()
        self.open, self.elements, self.pre = [], [], []
        self.text, self.outside_pre, self.figure_text = [], [], []
        self.rows, self.small, self.row = {}, {}, None
        self.feed(text)
        self.close()
        assert self.open == []
        self.tags = [tag for tag, _ in self.elements]

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, attributes))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.row = dict(attributes).get("data-measure")
            if self.row:
                self.rows[self.row], self.small[self.row] = [], ""
        if tag == "td" and self.row:
            self.rows[self.row].append("")
        if tag == "pre":
            self.pre.append("")

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, attributes))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> has no start tag"

    def handle_data(self, data):
        inside = self.open[-1] if self.open else None
        if "svg" in self.open:
            self.figure_text.append(data)
        elif inside != "style":
            self.text.append(data)
        if inside not in ("style", "pre"):
            self.outside_pre.append(data)
        if inside == "pre":
            self.pre[-1] += data
        if self.row and inside == "td":
            self.rows[self.row][-1] += data.strip()
        if self.row and inside == "small":
            self.small[self.row] += data

    def values(self, name: str) -> list[str]:
        return [
            value for _, attributes in self.elements for key, value in attributes if key == name
        ]


def rendered(tmp_path_factory, data: ReportData) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(data, path)
    return path.read_text(encoding="utf-8")


def unmeasured(name: str):
    """Returns a variant of a diverged run, without finite measurements."""
    rows = [{**row, "loss": math.nan} for row in report_sample.variant(name).history]
    fields = {"loss": math.nan, "bits_per_byte": None, "tokens_per_second": math.inf, "mfu": None}
    sections = {"qkv": math.nan, "mlp": 0.1}
    return report_sample.variant(name, history=rows, section_seconds=sections, memory={}, **fields)


SAMPLES = {
    "both": lambda: report_sample.report(),
    "dense": lambda: report_sample.report("dense", layouts=[], flop_ceiling=None),
    "sparse": lambda: report_sample.report("sparse"),
    "narrow": lambda: report_sample.report("sparse", "dense", "narrow"),
    "unmeasured": lambda: report_sample.report(
        variants=[unmeasured("dense"), unmeasured("sparse")]
    ),
    "bare": lambda: bare(continuations=[], notes=[], versions={}, projection_share=None),
}


@pytest.fixture(scope="module", params=SAMPLES)
def sample(request, tmp_path_factory):
    data = SAMPLES[request.param]()
    return data, rendered(tmp_path_factory, data)


def test_the_page_is_self_contained(sample):
    _, text = sample
    parsed = Page(text)
    loads = {
        "script",
        "link",
        "img",
        "image",
        "iframe",
        "object",
        "embed",
        "base",
        "audio",
        "video",
    }
    assert not loads & set(parsed.tags)
    assert not parsed.values("src") and not parsed.values("srcset") and not parsed.values("action")
    assert "http:" not in text and "https:" not in text and "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    assert text.startswith("<!doctype html>") and "default-src 'none'" in text


def test_every_reference_in_the_page_has_a_unique_target(sample):
    _, text = sample
    parsed = Page(text)
    ids = parsed.values("id")
    assert len(ids) == len(set(ids))
    targets = parsed.values("href")
    assert targets and all(target.startswith("#") for target in targets)
    named = [name for value in parsed.values("aria-labelledby") for name in value.split()]
    clip_paths = re.findall(r"url\(#([^)]*)\)", text)
    assert {target[1:] for target in targets} | set(named) | set(clip_paths) <= set(ids)
    assert all(dict(a).get("aria-labelledby") for t, a in parsed.elements if t == "svg")


def test_the_page_prints_no_raw_missing_values(sample):
    _, text = sample
    parsed = Page(text)
    assert not re.search(
        r"\b(nan|inf|null|undefined|None)\b", " ".join(parsed.outside_pre + parsed.figure_text)
    )


def test_the_page_shows_all_data(sample):
    data, text = sample
    parsed = Page(text)
    words = "".join(parsed.text)
    for value in (data.title, data.date, data.machine, data.corpus, data.tokenizer, *data.notes):
        assert value in words
    assert "\n" + console.with_commands(data.command) in parsed.pre
    assert all(f"{name}=={version}" in words for name, version in data.versions.items())
    pictures = {(layout.projection, str(layout.mask)) for layout in data.layouts}
    charts = 2 * any(math.isfinite(row["loss"]) for v in data.variants for row in v.history)
    metrics = 2 * any(v.history for v in data.variants)  # Tokens per second, gradient norm.
    bars = any(v.section_seconds for v in data.variants) + any(v.memory for v in data.variants)
    assert parsed.tags.count("svg") == len(pictures) + charts + metrics + bars
    assert ("No training history" in words) == (not charts)
    assert parsed.tags.count("article") == len(data.continuations)


@pytest.mark.parametrize(("name", "other"), [("dense", "sparse"), ("sparse", "dense")])
def test_a_single_variant_has_no_comparison(tmp_path_factory, name, other):
    parsed = Page(rendered(tmp_path_factory, report_sample.report(name, layouts=[])))
    assert parsed.rows and all(len(cells) == 1 for cells in parsed.rows.values())
    assert f"of-{name}" in parsed.values("class") and f"of-{other}" not in parsed.values("class")


def test_a_narrow_model_has_a_curve_a_verdict_and_a_sentence(tmp_path_factory):
    data = report_sample.report("sparse", "dense", "narrow", layouts=[])
    parsed = Page(rendered(tmp_path_factory, data))
    assert all(len(cells) == 5 for cells in parsed.rows.values())
    words = "".join(parsed.text)
    assert (
        "sparse vs. narrow" in words
        and "A narrower model without sparse weights, of equal FLOPs" in words
    )
    assert {"dense", "narrow", "sparse"} <= set(parsed.figure_text)
    pair = Page(rendered(tmp_path_factory, report_sample.report(layouts=[])))
    for field, cells in pair.rows.items():
        assert parsed.rows[field][0] == cells[0] and parsed.rows[field][3] == cells[2]


MEASURED = {
    "loss": st.floats(0.1, 20),
    "bits_per_byte": st.floats(0.1, 20),
    "stored_parameters": st.integers(1000, 10**13),
    "training_bytes": st.integers(1000, 10**15),
    "tokens_per_second": st.floats(1, 1e8),
    "step_seconds": st.floats(1e-3, 1e3),
    "flops_per_token": st.floats(1e3, 1e15),
    "mfu": st.none() | st.floats(0.01, 1),
}
QUALITY = ("loss", "bits_per_byte")
HIGHER_IS_BETTER = ("tokens_per_second", "mfu")
LOWER_WORDS = ("lower", "fewer", "less", "shorter", "slower")


@settings(max_examples=30)
@given(dense=st.fixed_dictionaries(MEASURED), sparse=st.fixed_dictionaries(MEASURED))
def test_the_table_has_the_numbers_of_the_data(tmp_path_factory, dense, sparse):
    new = {"dense": dense, "sparse": sparse}
    variants = [dataclasses.replace(v, **new[v.name]) for v in bare().variants]
    parsed = Page(rendered(tmp_path_factory, bare(variants=variants, continuations=[])))
    for field in MEASURED:
        pair = (dense[field], sparse[field])
        cells = parsed.rows[field]
        near = {"abs": 5.1e-4} if field in QUALITY else {"rel": 5.1e-3}
        for cell, value in zip(cells, pair):
            if value is None:
                assert cell == quantities.MISSING
            else:
                assert parse(cell) == pytest.approx(value, **near)
        if None in pair:
            assert cells[2] == quantities.MISSING
        elif cells[2] == "equal":
            assert pair[0] == pytest.approx(pair[1], rel=6e-3)
        elif cells[2] == "about equal":
            assert pair[0] == pytest.approx(pair[1], rel=2.1e-2)
        else:
            check_verdict(field, *pair, cells[2], parsed.small[field])


def check_verdict(field: str, dense: float, sparse: float, verdict: str, note: str):
    """Asserts that the verdict has the size, direction and judgement of the two values."""
    number, word = verdict.removesuffix(", within noise").split()
    if field in QUALITY:
        share = abs(sparse - dense) / dense
        assert parse(number) == pytest.approx(share, abs=5.1e-4)
    else:
        times = max(dense, sparse) / min(dense, sparse)
        assert parse(number.removesuffix("×")) == pytest.approx(times, rel=5.1e-3)
    assert (word in LOWER_WORDS) == (sparse < dense)
    if verdict.endswith("within noise"):
        assert field in QUALITY and "worse" not in note
        return
    assert ("worse" in note) == ((sparse < dense) == (field in HIGHER_IS_BETTER))


def test_the_speed_up_is_shown_with_its_ceiling(tmp_path_factory):
    variants = [dataclasses.replace(v, tokens_per_second=250.0 if v.name == "sparse" else 100.0)
                for v in bare().variants]  # fmt: skip
    parsed = Page(rendered(tmp_path_factory, bare(variants=variants, flop_ceiling=4.0)))
    assert parsed.rows["tokens_per_second"][2] == "2.50× faster"
    assert parsed.small["tokens_per_second"] == "62% of the FLOP ceiling 4.00×"
    parsed = Page(rendered(tmp_path_factory, bare(flop_ceiling=None)))
    assert "eiling" not in "".join(parsed.text)


@pytest.mark.parametrize(
    ("dense", "sparse", "text"),
    [
        ((1.345, 60), (1.234, 61), "sparse model is better: 1.234 bits per byte"),
        ((1.234, 60), (1.345, 60), "dense twin is better: 1.234 bits per byte"),
        ((1.2341, 60), (1.2342, 60), "both reach 1.234 bits per byte"),
        (
            (1.345, 60),
            (1.234, 30),
            "model reaches 1.234 after 30.0\N{NO-BREAK SPACE}s; its dense twin 1.345",
        ),
        ((None, 60), (1.234, 60), "is better: 2.598 nats per token"),
    ],
)
def test_the_headline_states_the_result(dense, sparse, text):
    new = {"dense": dense, "sparse": sparse}
    variants = [
        dataclasses.replace(v, bits_per_byte=new[v.name][0], train_seconds=new[v.name][1])
        for v in sorted(bare().variants, key=lambda v: v.name)
    ]
    sentence = page.headline(variants)
    assert text in sentence
    equal_times = abs(dense[1] - sparse[1]) <= 1
    assert ("equal wall-clock" in sentence) == equal_times


def trained_until(name, seconds, losses, end):
    """A variant that ended at `end` seconds, with held-out losses at some of them."""
    rows = [
        {"kind": "eval", "step": i + 1, "tokens": 9, "seconds": s, "loss": v, "bits_per_byte": v}
        for i, (s, v) in enumerate(zip(seconds, losses, strict=True))
    ]
    return report_sample.variant(name, history=rows, train_seconds=end, bits_per_byte=losses[-1])


@pytest.mark.parametrize(
    "dense, narrow, text",
    [
        # At 100 s the dense twin had 2.5, at its own end 1.0.
        (([50, 150, 200], [3.0, 2.0, 1.0], 200), None, "the sparse model is better: 2.000 bits"),
        (([50, 150], [1.0, 0.5], 150), None, "dense twin is better: 0.750 bits"),
        (
            ([50, 150, 200], [3.0, 2.0, 1.0], 200),
            ([80, 100, 130], [2.2, 1.9, 1.2], 130),
            "of equal FLOPs per token, reaches 1.900: 5.0% better than the sparse model.",
        ),
        (
            ([50, 100], [3.0, 2.5], 100),
            ([50, 100], [2.2, 1.99], 100),
            "0.5% better than the sparse model, within the noise of one seed.",
        ),
    ],
)
def test_models_are_compared_at_equal_seconds(dense, narrow, text):
    variants = [
        trained_until("dense", *dense),
        *([trained_until("narrow", *narrow)] if narrow else []),
        trained_until("sparse", [50, 100], [2.5, 2.0], 100),
    ]
    sentence = page.headline(variants).replace("\N{NO-BREAK SPACE}", " ")
    way = "" if dense[2] == (narrow or dense)[2] == 100 else ", by evaluations on the way"
    assert text in sentence and f"At equal wall-clock time (100 s each{way})" in sentence


def test_the_first_screen_has_the_verdict_and_the_two_curves(tmp_path_factory):
    data = report_sample.report("sparse", "dense", "narrow", layouts=[])
    text = rendered(tmp_path_factory, data)
    curves = [text.index(f"Loss against {x}.") for x in ("wall-clock time", "training FLOPs")]
    order = [text.index('class="headline"'), *curves, text.index('id="numbers"')]
    order += [text.index(data.notes[0][:20]), text.index("<h3>Versions")]
    assert order == sorted(order)


def test_the_headline_without_an_evaluation():
    variants = [dataclasses.replace(v, loss=None, bits_per_byte=math.nan) for v in bare().variants]
    assert page.headline(variants).startswith("This run has no held-out evaluation")


MARKUP = (
    "<b>",
    "</pre>",
    "<script>alert(1)</script>",
    "<!--",
    "-->",
    "&lt;",
    "&#0;",
    "]]>",
    "{{ 1 }}",
)
ANY_TEXT = st.lists(
    st.sampled_from([*MARKUP, " ", "\n", "\r", "\t", "\0", "\x1b", "\u202e", "\ud800", "'", '"'])
    | st.characters()
).map("".join)


@settings(max_examples=40)
@given(prompt=ANY_TEXT, truth=ANY_TEXT, dense=ANY_TEXT, sparse=ANY_TEXT, title=ANY_TEXT)
def test_any_text_is_escaped(tmp_path_factory, prompt, truth, dense, sparse, title):
    continuation = Continuation(prompt, truth, {"sparse": sparse, "dense": dense})
    data = bare(continuations=[continuation], title=title, command=title, notes=[title])
    parsed = Page(rendered(tmp_path_factory, data))
    # Browsers drop the first newline of a pre element; this parser keeps it.
    expected = ["\n" + quantities.visible(t) for t in (prompt, dense, sparse, truth, title)]
    assert parsed.pre[:5] == expected
    assert not {"script", "b"} & set(parsed.tags)


def test_layers_with_the_same_layout_share_a_picture():
    layouts = [report_sample.layout("qkv", 4, 12, layer, 2) for layer in (0, 1, 2, 5)]
    layouts += [report_sample.layout("qkv", 4, 12, layer, 3) for layer in (3,)]
    pictures, omitted = page.layout_pictures(layouts)
    assert [p["layers"] for p in pictures] == ["layers 0–2, 5", "layer 3"]
    assert omitted == 0
    assert (pictures[0]["fan_in"], pictures[0]["fan_out"]) == ("2", "6")


def test_an_unbalanced_layout_is_labelled(tmp_path_factory):
    layout = LayoutData("qkv", None, 2, 3, 64, [[0, 0], [1, 0], [0, 1]], 2, 2, False)
    words = "".join(Page(rendered(tmp_path_factory, bare(layouts=[layout]))).text)
    assert "not balanced" in words and "fan-in 0 to 2, fan-out 1 to 2" in words


@given(st.dictionaries(st.text(max_size=5), st.floats(0, 10) | st.just(math.nan), max_size=20))
def test_folding_small_categories_keeps_their_sum(values):
    categories = set(list(values)[:8])
    folded = page.fold(values, categories)
    assert set(folded) <= categories | {"other"}
    finite = [v for v in values.values() if math.isfinite(v)]
    assert math.fsum(folded.values()) == pytest.approx(math.fsum(finite))


def test_a_full_disk_keeps_the_old_report(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        write_report(bare(), path)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["report.html"]


def test_an_unwritable_path_is_named_in_the_error(tmp_path):
    path = tmp_path / "missing" / "report.html"
    with pytest.raises(UserError, match=re.escape(str(path))):
        write_report(bare(), path)


def test_a_profile_is_linked_with_its_longest_operations(tmp_path_factory):
    profile = ProfileData([["fusion.<1>", 0.03, 20], ["dot", 0.01, 10]], 0.05)
    data = dataclasses.replace(report_sample.report(layouts=[]), profile=profile)
    parsed = Page(rendered(tmp_path_factory, data))
    words = "".join(parsed.text)
    assert "profile/" in parsed.values("href")
    assert "fusion.<1>" in words and "60.0%" in words and "20.0%" in words
    assert ReportData.from_json(json.loads(json.dumps(data.to_json()))) == data


@pytest.mark.parametrize(
    "sparse, decided", [(2.0, False), (2.03, False), (1.97, False), (2.05, True), (1.95, True)]
)
def test_one_seed_decides_no_difference_within_the_range_over_seeds(sparse, decided):
    data = report_sample.report("dense", "sparse")
    dense_model, sparse_model = (
        dataclasses.replace(v, loss=value, bits_per_byte=value, train_seconds=60.0)
        for v, value in zip(data.variants, (2.0, sparse), strict=True)
    )
    verdict = page.table([dense_model, sparse_model], None)[1]["verdicts"][0]
    assert (verdict[1] is not None) == decided
    words = "within" in verdict[0] or verdict[0] == "equal"
    assert words != decided
    if sparse != 2.0:
        assert ("within the noise" in page.headline([dense_model, sparse_model])) != decided


def test_a_run_of_few_steps_states_no_goodput():
    seconds = {"productive": 2.0, "compile": 98.0}
    assert "%" not in page.goodput(seconds, 3)
    assert page.goodput(seconds, 300).startswith("2.0% of 100 s")
