"""A model directory keeps its special tokens, ends and files; what is not used is said."""

import dataclasses
import json
import logging

import directories
import numpy as np
import pytest
from directories import SPECIALS, VOCAB, config, engine, weights, write
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from marks import examples

import sparse_dataflow as sd
from sparse_dataflow.data.corpora import corpus_of_texts
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.data.tokens import prepare_tokens
from sparse_dataflow.evaluation.stopping import StreamDecoder
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import huggingface
from sparse_dataflow.interchange.special_tokens import FILES

BOS, END, TURN, HEADER, PAD = (engine().token_to_id(token) for token in SPECIALS)
NAMED = {"bos_token": SPECIALS[0], "eos_token": SPECIALS[1]}


def theirs(tokenizer, ids):
    return [tokenizer.original_ids[number] for number in ids]


def continued(folder, **options):
    [text] = sd.generate(sd.load(folder), ["the cat"], max_new_tokens=5, **options)
    return text.stopped_by, len(text.tokens)


@pytest.mark.parametrize(
    ("ends", "generation", "written", "expected"),
    [
        (END, None, END, "end"),
        ([END, TURN], None, TURN, "end"),
        pytest.param([TURN, END, PAD], None, PAD, "end", marks=pytest.mark.slow),
        pytest.param(END, [END, TURN], TURN, "end", marks=pytest.mark.slow),
        (..., [TURN], TURN, "end"),
        (None, TURN, TURN, "end"),
        # transformers obeys generation_config.json alone.
        ([END, TURN], END, TURN, "length"),
        pytest.param(END, {}, TURN, "length", marks=pytest.mark.slow),
    ],
)
def test_a_text_stops_at_the_ends_that_transformers_stops_at(
    tmp_path, ends, generation, written, expected
):
    files = {} if generation is None else {"generation_config__json": {"eos_token_id": generation}}
    files = {"generation_config__json": {}} if generation == {} else files
    fields = config(eos_token_id=ends)
    folder = write(tmp_path / "model", fields, engine(), weights(written), **files)
    assert continued(folder)[0] == expected
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("torch", reason="torch is not installed")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompt = transformers.AutoTokenizer.from_pretrained(folder)("the cat", return_tensors="pt")
    prompt.pop("token_type_ids", None)
    output = model.generate(**prompt, max_new_tokens=5, do_sample=False)
    count = output.shape[1] - prompt.input_ids.shape[1]
    # transformers appends the token that ends the text.
    assert count == (1 if expected == "end" else 5)


def test_a_stop_string_may_have_special_tokens(tmp_path):
    folder = write(tmp_path / "model", config(eos_token_id=END), engine(), weights(TURN))
    assert continued(folder, stop=[SPECIALS[2]]) == ("stop", 1)
    assert continued(folder, stop=[SPECIALS[2] * 2]) == ("stop", 2)
    assert continued(folder, stop=["turn"]) == ("length", 5)
    tokenizer = sd.load(folder).tokenizer
    decoder = StreamDecoder(tokenizer, [f"cat{SPECIALS[3]}the", "never"])
    ids = [
        *tokenizer.encode("the cat"),
        tokenizer.special_ids[SPECIALS[3]],
        *tokenizer.encode("th"),
    ]
    text = "".join(decoder.add(int(number)) for number in ids)
    assert text == "the " and not decoder.stopped_by
    text += "".join(decoder.add(int(number)) for number in tokenizer.encode("e end"))
    assert (text, decoder.stopped_by) == ("the ", "stop")


@pytest.mark.parametrize("prefixed", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_the_begin_of_text_is_where_the_library_puts_it(tmp_path, prefixed, first):
    library = engine(prefixed, first)
    end = library.token_to_id(SPECIALS[1])
    folder = write(tmp_path / "model", config(eos_token_id=end), library)
    tokenizer = sd.load(folder).tokenizer
    texts = ["the cat", "sat on", "home"]
    encoded = [theirs(tokenizer, ids) for ids in tokenizer.encode_prompts(texts)]
    assert encoded == [library.encode(text).ids for text in texts]
    prepared = prepare_tokens(corpus_of_texts(texts * 20), tokenizer, tmp_path / "cache")
    ids = np.asarray(prepared.train.tokens[:])
    ends = np.flatnonzero(ids == tokenizer.eot_id)
    first_document = theirs(tokenizer, ids[: ends[0] + 1])
    assert first_document in [[*library.encode(text).ids, end] for text in texts]


def test_add_bos_token_of_the_settings_comes_before_the_post_processor(tmp_path, caplog):
    fields = config(eos_token_id=END)
    for prefixed, flag in ((True, False), (False, True)):
        settings = {**NAMED, "add_bos_token": flag}
        folder = tmp_path / str(flag)
        write(folder, fields, engine(prefixed), tokenizer_config__json=settings)
        ids = sd.load(folder).tokenizer.encode_prompts(["the cat"])
        assert theirs(sd.load(folder).tokenizer, ids[0])[:1] == ([BOS] if flag else ids[0][:1])
    assert "adds the begin of text" in caplog.text and "leaves out the begin" in caplog.text


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"eos_token": SPECIALS[2]}, TURN),
        ({"eos_token": {"content": SPECIALS[2], "__type": "AddedToken"}}, TURN),
        ({"eos_token": "</s>"}, None),
        ({}, None),
    ],
)
def test_a_config_without_an_end_takes_that_of_the_tokenizer_or_is_refused(
    tmp_path, settings, expected
):
    for name, ends in (("absent", {}), ("null", {"eos_token_id": None})):
        folder = tmp_path / name
        write(folder, config(**ends), engine(), tokenizer_config__json=settings)
        if expected is None:
            with pytest.raises(UserError, match="no file names the end of text; legal"):
                sd.load(folder)
            continue
        model = sd.load(folder)
        assert theirs(model.tokenizer, [model.tokenizer.eot_id]) == [expected]
        out = sd.save(model, tmp_path / f"{name}_out", form="dense")
        assert json.loads((out / "config.json").read_text())["eos_token_id"] == expected


def test_a_tied_config_with_another_output_layer_keeps_it(tmp_path, caplog):
    arrays = weights()
    equal = {**arrays, "lm_head.weight": arrays["model.embed_tokens.weight"].copy()}
    tied = config(tie_word_embeddings=True, eos_token_id=END)
    assert sd.load(write(tmp_path / "equal", tied, engine(), equal)).model.tied_embeddings
    assert "lm_head" not in caplog.text
    model = sd.load(write(tmp_path / "other", tied, engine(), arrays))
    assert "lm_head.weight is another matrix" in caplog.text
    untied = write(tmp_path / "untied", config(eos_token_id=END), engine(), arrays)
    ids = np.array([[3, 4, 5]])
    np.testing.assert_array_equal(sd.logits(model, ids), sd.logits(sd.load(untied), ids))
    out = sd.save(model, tmp_path / "out", form="dense")
    assert not json.loads((out / "config.json").read_text())["tie_word_embeddings"]


DISAGREE = {
    "rope_scaling beside rope_parameters": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    },
    "rope_theta twice": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "rope_theta of both": {
        "rope_theta": ...,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "rope_scaling": {"rope_type": "default", "rope_theta": 1e4},
    },
    "type beside rope_type": {"rope_scaling": {"type": "linear", "rope_type": "default"}},
    "rope_scaling without a type": {"rope_scaling": {"factor": 2.0}},
    "one for each kind of layer": {
        "rope_theta": ..., "rope_parameters": {"full_attention": {"rope_theta": 1e6}},
    },
}  # fmt: skip


@pytest.mark.parametrize("changes", DISAGREE.values(), ids=DISAGREE)
def test_two_fields_for_one_fact_that_disagree_are_refused(tmp_path, changes):
    folder = write(tmp_path / "model", config(eos_token_id=END, **changes), engine())
    with pytest.raises(UserError, match="legal"):
        sd.load(folder)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mistral", {"sliding_window": 8, "layer_types": ["full_attention"]}),
        ("mistral", {"sliding_window": None, "layer_types": ["sliding_attention"]}),
        ("qwen2", {"use_sliding_window": False, "layer_types": ["sliding_attention"]}),
        ("qwen2", {"layer_types": ["full_attention"] * 3}),
        ("gpt2", {"n_embd": 32, "hidden_size": 64}),
        ("mixtral", {"num_local_experts": 4, "num_experts": 8, "num_experts_per_tok": 2}),
        ("qwen3_moe", {"num_local_experts": 4, "num_experts": 8, "num_experts_per_tok": 2}),
    ],
)
def test_aliases_and_layer_types_that_disagree_are_refused(tmp_path, kind, changes):
    folder = write(tmp_path / "model", config(model_type=kind, eos_token_id=END, **changes))
    with pytest.raises(UserError, match="legal"):
        sd.load(folder)


def test_both_rotary_fields_with_one_meaning_are_read(tmp_path):
    same = {"rope_type": "default", "rope_theta": 1e4}
    changes = {"rope_parameters": same, "rope_scaling": {"type": "default"}}
    folder = write(tmp_path / "model", config(eos_token_id=END, **changes), engine())
    assert sd.load(folder).model.rotary_base == 1e4


def test_an_export_says_dtype_once(tmp_path):
    fields = config(eos_token_id=END, dtype="bfloat16", torch_dtype="float16")
    model = sd.load(write(tmp_path / "model", fields, engine()))
    exported = json.loads((sd.save(model, tmp_path / "out", "dense") / "config.json").read_text())
    assert exported["dtype"] == exported["torch_dtype"] == "float32"


def test_vocab_json_with_added_tokens_keeps_its_ids(tmp_path):
    fields = json.loads(engine(prefixed=False, first=True).to_str())["model"]
    files = {
        "vocab__json": fields["vocab"],
        "merges__txt": "\n".join(["#version: 0.2", *(" ".join(m) for m in fields["merges"])]),
        "added_tokens__json": {"<|tool|>": 330, "two words": 331},
        "tokenizer_config__json": {
            **NAMED, "tokenizer_class": "GPT2Tokenizer", "add_bos_token": True,
            "additional_special_tokens": ["<|tool|>"],
        },
    }  # fmt: skip
    folder = write(tmp_path / "model", config(eos_token_id=1), None, **files)
    tokenizer = sd.load(folder).tokenizer
    assert theirs(tokenizer, tokenizer.encode_prompts(["the two words"])[0])[0] == 0
    assert 331 in theirs(tokenizer, tokenizer.encode("the two words"))
    out = sd.save(sd.load(folder), tmp_path / "out", form="dense")
    for name in ("vocab.json", "merges.txt", "added_tokens.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    again = sd.load(out).tokenizer
    text = "the two words ran home"
    assert theirs(again, again.encode(text)) == theirs(tokenizer, tokenizer.encode(text))
    other = {**files["tokenizer_config__json"], "tokenizer_class": "Qwen2Tokenizer"}
    files = {**files, "tokenizer_config__json": other}
    with pytest.raises(UserError, match="Qwen2Tokenizer without a tokenizer"):
        sd.load(write(tmp_path / "qwen", config(eos_token_id=1), None, **files))


ids = st.sampled_from([BOS, END, TURN, HEADER, PAD])
token = st.sampled_from(SPECIALS).flatmap(
    lambda text: st.sampled_from([text, {"content": text, "__type": "AddedToken"}])
)
ends = st.one_of(st.none(), ids, st.lists(ids, min_size=1, max_size=3, unique=True))
names = st.fixed_dictionaries(
    {"eos_token": token},
    optional={
        "bos_token": token,
        "pad_token": st.one_of(st.none(), token),
        "unk_token": token,
        "chat_template": st.sampled_from(["{{ messages[0].content }}{{ eos_token }}"]),
        "add_bos_token": st.booleans(),
        "model_max_length": st.integers(8, 10**30),
        "tokenizer_class": st.just("PreTrainedTokenizerFast"),
    },
)
FIELDS = {
    "bos_token_id": ids,
    "pad_token_id": st.one_of(st.none(), ids),
    "eos_token_id": ends,
    "torch_dtype": st.sampled_from(["bfloat16", "float32"]),
    "dtype": st.sampled_from(["bfloat16", "float32"]),
    "attention_dropout": st.sampled_from([0.0, 0.1]),
    "our_own_field": st.sampled_from([3, "text", {"a": [1]}]),
    "rope_scaling": st.just({"rope_type": "default"}),
    "num_key_value_heads": st.just(None),
    "transformers_version": st.just("4.46.3"),
}
TEMPLATE = "{{ bos_token }}{{ messages[0]['content'] }}"
JSON_FILES = {
    "tokenizer_config__json": names,
    "generation_config__json": st.fixed_dictionaries(
        {}, optional={"eos_token_id": ends, "bos_token_id": ids, "temperature": st.just(0.6)}
    ),
    "special_tokens_map__json": st.fixed_dictionaries(
        {}, optional={"bos_token": token, "pad_token": token, "eos_token": token}
    ),
    "chat_template__jinja": st.just(TEMPLATE),
    "special_notes__txt": st.just("not read by anyone"),
}


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@example({"eos_token_id": END}, {"chat_template__jinja": TEMPLATE}, False, False)
@given(
    st.fixed_dictionaries({}, optional=FIELDS),
    st.fixed_dictionaries({}, optional=JSON_FILES),
    st.booleans(),
    st.booleans(),
)
def test_what_goes_in_comes_out_or_is_said(
    tmp_path_factory, caplog, fields, files, prefixed, first
):
    """Over drawn directories: files and fields are equal after an import, a run's files and an
    export, in both forms; a line names each one that is not."""
    tmp_path = tmp_path_factory.mktemp("drawn")
    folder = write(tmp_path / "in", config(**fields), engine(prefixed, first), **files)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        try:
            model = sd.load(folder)
        except UserError as error:
            assert "no file names the end of text" in str(error) or "text token" in str(error)
            return
        # A run stores its tokenizer, and the export reads it from there.
        model.tokenizer.save(tmp_path / "tokenizer.json")
        stored = Tokenizer.load(tmp_path / "tokenizer.json")
        assert stored == model.tokenizer
        assert stored.identity.files == model.tokenizer.identity.files
        between = sd.load(sd.save(model, tmp_path / "sparse", form="sparse"))
        assert between.tokenizer == model.tokenizer
        assert between.tokenizer.identity.files == model.tokenizer.identity.files
        out = sd.save(between, tmp_path / "out", form="dense")
    log = caplog.text
    for path in folder.iterdir():
        if path.name in ("config.json", "model.safetensors"):
            continue
        same = (out / path.name).exists() and path.read_bytes() == (out / path.name).read_bytes()
        assert same or path.name in log, path.name
        assert path.name in {*FILES, "tokenizer.json"} or path.name in log
    before, after = (json.loads((f / "config.json").read_text()) for f in (folder, out))
    for name, value in before.items():
        assert after[name] == value or name.endswith("dtype") or f"{name}=" in log, name
    assert "our_own_field" in log or "our_own_field" not in before
    again = sd.load(out).tokenizer
    assert (again.ends, again.identity.prefix, again.start_id) == (
        model.tokenizer.ends, model.tokenizer.identity.prefix, model.tokenizer.start_id,
    )  # fmt: skip
    assert again.chat_template == model.tokenizer.chat_template
    generation = json.loads(files_text(folder, "generation_config.json"))
    expected_ends = generation.get("eos_token_id") or fields.get("eos_token_id")
    if expected_ends:
        expected = {expected_ends} if isinstance(expected_ends, int) else set(expected_ends)
        assert set(theirs(model.tokenizer, model.tokenizer.ends)) == expected


def files_text(folder, name):
    return (folder / name).read_text() if (folder / name).exists() else "{}"


@pytest.mark.parametrize("form", huggingface.READABLE)
def test_our_own_models_have_no_files_of_others(tmp_path, form):
    model = sd.load(write(tmp_path / "in", config(eos_token_id=END), engine()))
    assert dict(model.tokenizer.identity.files)["config.json"]
    plain = Tokenizer(tuple(directories.engine_alphabet()), (), VOCAB)
    loaded = sd.load(sd.save(model_with(model, plain), tmp_path / "own", form=form))
    assert loaded.tokenizer == plain and not loaded.tokenizer.identity.files


def model_with(model, tokenizer):
    return dataclasses.replace(model, tokenizer=tokenizer)
