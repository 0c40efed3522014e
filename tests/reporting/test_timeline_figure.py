"""The timeline: every span is drawn at its place, and pieces of one section are one bar."""

from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.parallel.relay.timeline import KINDS, Span, hidden_share, seconds
from sparse_dataflow.reporting.timeline_figure import LANES, timeline

spans = st.lists(
    st.builds(
        lambda kind, block, start, length: Span(kind, f"block {block}", start, start + length),
        st.sampled_from(KINDS),
        st.integers(0, 12),
        st.floats(0, 9),
        st.floats(0, 3),
    ),
    min_size=1,
    max_size=20,
)


@given(spans)
@settings(max_examples=15)
def test_any_spans_are_drawn(found):
    drawn = ElementTree.fromstring(str(timeline(found, "t", "some words")))
    texts = "".join(drawn.itertext())
    assert all(kind in texts for kind in LANES) and "some words" in texts


@given(spans)
def test_the_hidden_share_is_one_of_the_transfer(found):
    share = hidden_share(found)
    assert 0 <= share <= 1 + 1e-9
    assert hidden_share(found, ("compute",)) in (1.0,) or not seconds(found, "compute") > 1e-6
    doubled = [*found, *found]
    assert abs(hidden_share(doubled) - share) < 1e-9


def test_shares_by_hand():
    found = [Span("fetch", "a", 0, 2), Span("compute", "a", 1, 4), Span("return", "a", 3, 5)]
    assert hidden_share(found) == 0.5
    assert seconds([*found, Span("fetch", "b", 1, 3)], "fetch") == 3
    assert hidden_share([Span("compute", "a", 0, 1)]) == 1.0
