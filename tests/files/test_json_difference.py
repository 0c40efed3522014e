from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.files.json_files import differences

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=6,
)


@given(JSON, JSON)
def test_configs_differ_exactly_where_their_json_does(first, second):
    alike = repr(sorted_json(first)) == repr(sorted_json(second))
    assert (list(differences(first, second)) == []) == alike


def sorted_json(value):
    if isinstance(value, dict):
        return {"": [(name, sorted_json(value[name])) for name in sorted(value)]}
    return [sorted_json(item) for item in value] if isinstance(value, list) else value


def test_differences_are_named_by_their_place():
    saved = {"model": {"d_model": 64, "heads": [2, 4]}, "same": 1}
    expected = {"model": {"d_model": 128, "heads": [2], "bias": True}, "same": 1}
    assert list(differences(saved, expected)) == [
        ("model.bias", "absent", "true"),
        ("model.d_model", "64", "128"),
        ("model.heads", "[2, 4]", "[2]"),
    ]
    assert list(differences(3, None)) == [("the value", "3", "null")]
