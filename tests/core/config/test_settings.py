import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.core.config import settings
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.settings import Setting
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.run_config import SIZES, RunConfig, preset

NAMES = ("butterfly", "cyclic", "Banded")
KINDS = {
    "count": Setting("count", int, 3, "", legal=(">= 1", lambda n: n >= 1)),
    "share": Setting("share", float, 0.5, ""),
    "shape": Setting("shape", str, "cyclic", "", choices=NAMES),
    "shapes": Setting("shapes", tuple[str, ...], NAMES, "", choices=NAMES),
    "texts": Setting("texts", tuple[str, ...], ("1",), ""),
    "steps": Setting("steps", tuple[int, ...], (), ""),
    "both": Setting("both", bool, False, ""),
    "where": Setting("where", str, "", ""),
}
PATHS = settings.by_path(RunConfig)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("count", "7", 7),
        ("share", "1e-3", 1e-3),
        ("shape", "BANDED", "Banded"),
        ("shapes", "banded,butterfly", ("butterfly", "Banded")),
        ("shapes", "all", NAMES),
        ("shapes", "none", ()),
        ("shapes", "", ()),
        ("texts", "1x16,4", ("1x16", "4")),
        ("texts", "all", ("all",)),
        ("texts", "none", ()),
        ("texts", "b, a,b", ("b", "a")),
        ("steps", "5,6,5", (5, 6, 5)),
        ("both", "yes", True),
        ("both", "False", False),
        ("where", "a=b", "a=b"),
    ],
)
def test_a_text_names_a_value_of_the_settings_type(name, text, value):
    assert KINDS[name].parse(text) == value


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("count", "x", "is not a whole number."),
        ("count", "1.0", "is not a whole number."),
        ("count", "0", "is not legal: it must be >= 1."),
        ("share", "half", "is not a number."),
        ("share", "nan", "is not a finite number."),
        ("share", "1e999", "is not a finite number."),
        ("both", "maybe", "is not legal: it must be yes or no."),
        ("shape", "zzz", "is unknown. Legal: butterfly, cyclic, Banded."),
        (
            "shape",
            "buterfly",
            "is unknown; did you mean butterfly? Legal: butterfly, cyclic, Banded.",
        ),
        ("shapes", "all,cyclic", "mixes all or none with names; give one or the other."),
    ],
)
def test_a_text_that_names_no_value_is_answered_with_what_is_legal(name, text, reason):
    with pytest.raises(ValueError) as refused:
        KINDS[name].parse(text)
    assert str(refused.value) == reason


def legal_value(draw, s: Setting):
    if s.type is bool:
        return draw(st.booleans())
    if s.type == tuple[str, ...]:
        if not s.choices:
            names = st.text("abx019", min_size=1).filter(lambda name: name != "none")
            return tuple(draw(st.lists(names, unique=True)))
        chosen = draw(st.sets(st.sampled_from(s.choices)))
        return tuple(name for name in s.choices if name in chosen)
    if s.type is str:
        if s.choices:
            return draw(st.sampled_from(s.choices))
        texts = st.text(max_size=20)
        # A path has no NUL, and a leading ~ is a home folder.
        return draw(texts.filter(lambda t: "\0" not in t and t[:1] != "~") if s.path else texts)
    is_list = s.type in (tuple[int, ...], tuple[float, ...])
    whole = s.type in (int, tuple[int, ...])
    numbers = st.integers(0, 10**6) if whole else st.floats(0, 1, allow_nan=False)
    if is_list:
        numbers = st.lists(numbers, min_size=s.default != (), max_size=4).map(tuple)
    return draw(numbers.filter(lambda n: not s.value_refusal(n)))


@given(st.sampled_from([*PATHS.values(), *KINDS.values()]), st.data())
def test_a_value_survives_being_written_and_parsed(s, data):
    value = legal_value(data.draw, s)
    if s.type is str and not s.choices:
        assert s.parse(value) == value
    else:
        assert s.parse(settings.text(value)) == value


@given(st.sampled_from([*PATHS.values(), *KINDS.values()]), st.text(max_size=40))
def test_any_text_is_parsed_or_refused_in_words(s, text):
    try:
        value = s.parse(text)
    except ValueError as refusal:
        assert str(refusal).startswith(("is ", "mixes "))
    else:
        assert not s.value_refusal(value)


@pytest.mark.parametrize("scale", SIZES)
def test_a_preset_survives_json(scale):
    config = preset(scale)
    assert RunConfig.from_json(config.to_json()) == config


def test_every_number_has_an_upper_bound():
    """So that a typo neither runs nor allocates for ever: the answer comes at once."""
    for path, s in PATHS.items():
        if s.type in (int, float):
            assert s.value_refusal(s.type(10**300 if s.type is int else 1e300)), path


def test_every_setting_has_help_and_a_legal_default():
    for path, s in PATHS.items():
        assert s.help.endswith("."), path
        if s.default is not dataclasses.MISSING:
            assert not s.value_refusal(s.default), path


def test_a_preset_is_made_of_settings_alone():
    """What is no setting is derived, so a RunConfig never holds it."""
    config = preset("pico")
    for part in dataclasses.fields(config):
        for field in dataclasses.fields(part.type):
            if "setting" not in field.metadata:
                assert getattr(getattr(config, part.name), field.name) == field.default


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batchh": 1}, "There is no setting batchh; did you mean training.batch?"),
        ({"warmup": 0.1}, "did you mean training.warmup?"),
        ({"trainig.batch": 1}, "did you mean training.batch?"),
        ({"zzz": 1}, "There is no setting zzz; --help=all lists them."),
        ({"training.batch": "7x"}, "training.batch=7x is not a whole number."),
        ({"training.batch": True}, "training.batch=yes is not legal: it must be a whole number."),
        ({"training.batch": 0}, "training.batch=0 is not legal: it must be from 1 to 4,194,304."),
        ({"training.seed": 2**70}, f"training.seed={2**70} is not legal: it must be "),
        ({"model.remat": "ful"}, "model.remat=ful is unknown. Legal: none, keep, full, offload"),
        ({"sparsity.projections": ("qvk",)}, "sparsity.projections=qvk is unknown."),
    ],
)
def test_changes_that_are_not_legal_name_what_is(changes, words):
    with pytest.raises(UserError) as refused:
        settings.changed(preset("pico"), changes)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda c: [], "an object"),
        (lambda c: {**c, "training": 3}, "an object"),
        (lambda c: {k: v for k, v in c.items() if k != "data"}, "'data' is missing"),
        (lambda c: {**c, "dta": {}}, "did you mean data?"),
        (lambda c: {**c, "model": {}}, "'num_layers' is missing"),
        (lambda c: {**c, "data": {**c["data"], "corpse": 1}}, "did you mean corpus?"),
        (lambda c: {**c, "data": {**c["data"], "corpus": 3}}, "data.corpus=3 is not legal"),
        (lambda c: {**c, "data": {**c["data"], "corpus": None}}, "data.corpus=auto is not legal"),
    ],
)
def test_json_that_is_no_config_is_refused_in_words(damage, words):
    with pytest.raises(UserError) as refused:
        RunConfig.from_json(damage(preset("pico").to_json()))
    assert words in str(refused.value)


def test_a_setting_that_a_saved_config_lacks_takes_its_default():
    saved = preset("pico").to_json()
    del saved["model"]["num_kv_heads"]
    assert RunConfig.from_json(saved) == preset("pico")


@pytest.mark.parametrize(
    ("saved", "now"), [("dots", "keep"), ("full:1,dots:1", "full:1,keep:1"), ("full", "full")]
)
def test_a_file_may_have_the_former_name_of_a_value_and_a_user_may_not(saved, now):
    config = preset("pico").change(model__remat=now)
    fields = config.to_json()
    fields["model"]["remat"] = saved
    assert RunConfig.from_json(fields) == config
    assert ModelConfig.from_json({**config.model.to_json(), "remat": saved}) == config.model
    if saved != now:
        with pytest.raises(UserError, match=r"dots.*legal: none, keep, full|dots.*Legal"):
            preset("pico").change(model__remat=saved)


@given(st.sampled_from(["count", "share", "shapes", "where"]), st.data())
def test_a_dropped_or_doubled_letter_finds_its_name(name, data):
    at = data.draw(st.integers(0, len(name) - 1))
    wrong = data.draw(
        st.sampled_from([name[:at] + name[at + 1 :], name[:at] + name[at] + name[at:]])
    )
    if wrong in ("shape", "shapes"):
        return
    legal = ["count", "share", "shapes", "where"]
    assert settings.did_you_mean(wrong, legal) == f"did you mean {name}?"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("d\udcc3\udcbcr", "is UTF-8, .*PYTHONUTF8=1"),
        ("\udce2\udc82\udcac", "is UTF-8, .*PYTHONUTF8=1"),
        ("a/\udcf0\udc9f\udc98\udc80", "is UTF-8, .*PYTHONUTF8=1"),
        ("d\udcfcr", r"is not UTF-8\."),
        ("\udcc3", r"is not UTF-8\."),
    ],
)
def test_a_path_that_the_locale_does_not_read_is_told_from_one_that_is_not_utf_8(name, words):
    """Python puts a surrogate for each byte of an argument that it cannot decode."""
    with pytest.raises(ValueError, match=words):
        KINDS["where"].parse(name)


NO_PLACES = {
    "model.attention_blocks", "model.layer_types", "model.rotary_layers", "model.remat",
    "sparsity.budget", "evolution.method", "training.optimizer", "data.column", "parallel.mesh",
    "parallel.schedule", "parallel.memory_limit", "parallel.depth_schedule", "run.profile",
}  # fmt: skip
"""Settings of any text that name no place: a new one is added here, or is one of the others."""

ONLY_READ = {
    "training.teacher",
    "data.corpus",
    "data.validation",
    "data.tokenizer",
    "run.init_from",
}
"""Places that a resumed run takes from its folder: their content is compared with its record."""


def test_a_run_folder_alone_names_no_place_that_is_written_or_sent_to():
    texts = {path for path, s in PATHS.items() if s.type is str and not s.choices}
    on_the_command_line = {p for p in texts if PATHS[p].resumed in (settings.FRESH, settings.ASKED)}
    assert texts - on_the_command_line - NO_PLACES == ONLY_READ
    assert {
        "run.mirror",
        "run.out",
        "parallel.server_dir",
        "parallel.coordinator",
    } <= on_the_command_line
    assert {path for path in ONLY_READ if PATHS[path].path} == ONLY_READ


def test_a_place_cannot_be_a_setting_that_a_resumed_run_adopts():
    with pytest.raises(TypeError, match="FRESH or ASKED"):
        settings.setting("", "A new folder.", path=True, resumed=settings.ADOPTED)
