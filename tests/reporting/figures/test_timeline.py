"""Timelines of relay steps, and the overlap of transfers with compute."""

from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.relay.timeline import KINDS, Span, hidden_share, seconds
from sparse_dataflow.reporting.figures.timeline import LANES, timeline

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
def test_the_timeline_has_all_lanes_and_a_description(spans):
    picture = ElementTree.fromstring(str(timeline(spans, "t", "some words")))
    texts = "".join(picture.itertext())
    assert all(kind in texts for kind in LANES) and "some words" in texts


@given(spans)
def test_the_hidden_share_is_a_fraction_that_ignores_duplicates(spans):
    share = hidden_share(spans)
    assert 0 <= share <= 1 + 1e-9
    assert hidden_share(spans, ("compute",)) == 1.0 or not seconds(spans, "compute") > 1e-6
    assert abs(hidden_share([*spans, *spans]) - share) < 1e-9


def test_hidden_share_examples():
    example = [Span("fetch", "a", 0, 2), Span("compute", "a", 1, 4), Span("return", "a", 3, 5)]
    assert hidden_share(example) == 0.5
    assert seconds([*example, Span("fetch", "b", 1, 3)], "fetch") == 3
    assert hidden_share([Span("compute", "a", 0, 1)]) == 1.0
