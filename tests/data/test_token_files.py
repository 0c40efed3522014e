"""Token ids that another program wrote, in the formats that people have."""

import json
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from tensorflow_datasets.proto import tf_example_pb2

from sparse_dataflow.commands.training_data import corpus_of, tokenizer_of
from sparse_dataflow.data import cache
from sparse_dataflow.data.corpora import load_corpus
from sparse_dataflow.data.token_ids import with_text
from sparse_dataflow.data.tokenizer import Tokenizer, gpt2_tokenizer, id_tokenizer
from sparse_dataflow.data.tokens import prepare_tokens
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.run_config import DataConfig, preset

IDS = np.random.default_rng(0).integers(0, 50256, 3000)
VALIDATION = np.random.default_rng(1).integers(0, 50256, 200)
IDS[99::100] = VALIDATION[99::100] = 50256  # End of text.


def nanogpt(folder):
    IDS.astype("<u2").tofile(folder / "train.bin")
    VALIDATION.astype("<u2").tofile(folder / "val.bin")


def llm_c(folder, name="fineweb_train_000001.bin", ids=IDS, magic=20240520, dtype="<u2"):
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, len(ids)
    (folder / name).write_bytes(header.tobytes() + ids.astype(dtype).tobytes())


def llama(folder):
    llm_c(folder, magic=20240801, dtype="<u4")


def megatron(folder, code=8, dtype="<u2"):
    """As `MMapIndexedDatasetBuilder` of Megatron-LM writes sequences and their index."""
    sizes = np.full(30, 100, "<i4")
    starts = np.arange(30, dtype="<i8") * 100 * np.dtype(dtype).itemsize
    IDS.astype(dtype).tofile(folder / "my_text_document.bin")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 30, 31)
    tail = np.arange(31, dtype="<i8").tobytes()
    (folder / "my_text_document.idx").write_bytes(head + sizes.tobytes() + starts.tobytes() + tail)


def megatron_int32(folder):
    megatron(folder, 4, "<i4")


def parquet(folder):
    rows = [{"input_ids": piece.tolist(), "length": 100} for piece in IDS.reshape(30, 100)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet", row_group_size=7)


def array_record(folder):
    writer = ArrayRecordWriter(str(folder / "a.array_record"), "group_size:1")
    for piece in IDS.reshape(30, 100):
        example = tf_example_pb2.Example()
        example.features.feature["tokens"].int64_list.value.extend(piece.tolist())
        writer.write(example.SerializeToString())
    writer.close()


FORMATS = [nanogpt, llm_c, llama, megatron, megatron_int32, parquet, array_record]


def everything(prepared):
    return np.concatenate([prepared.train.tokens[:], prepared.validation.tokens[:]])


@pytest.mark.parametrize("written", FORMATS)
def test_ids_of_every_format_are_the_tokens_that_were_written(tmp_path, written):
    folder = tmp_path / "ids"
    folder.mkdir()
    written(folder)
    corpus = load_corpus(str(folder), tmp_path / "cache")
    prepared = prepare_tokens(corpus, gpt2_tokenizer(), tmp_path / "cache")
    assert len(prepared.validation.tokens) == (200 if written is nanogpt else 150)
    expected = np.concatenate([IDS, VALIDATION]) if written is nanogpt else IDS
    np.testing.assert_array_equal(everything(prepared), expected)
    assert prepared.validation.documents == 2
    bytes_of = gpt2_tokenizer().token_bytes[np.asarray(prepared.train.tokens)]
    assert prepared.train.text_bytes == bytes_of.sum()
    again = load_corpus(str(folder), tmp_path / "cache")
    assert again.content_hash == corpus.content_hash
    text = with_text(corpus, gpt2_tokenizer()).validation
    assert gpt2_tokenizer().encode(text[0].text) is not None and len(text) == 2


def test_a_single_file_is_a_corpus(tmp_path):
    nanogpt(tmp_path)
    corpus = load_corpus(str(tmp_path / "train.bin"), tmp_path / "cache")
    prepared = prepare_tokens(corpus, id_tokenizer(50257), tmp_path / "cache")
    np.testing.assert_array_equal(everything(prepared), IDS)


def test_a_file_of_the_users_own_is_held_out(tmp_path):
    nanogpt(tmp_path)
    train, held_out = str(tmp_path / "train.bin"), str(tmp_path / "val.bin")
    corpus = load_corpus(train, tmp_path / "cache", validation=held_out)
    prepared = prepare_tokens(corpus, gpt2_tokenizer(), tmp_path / "cache")
    np.testing.assert_array_equal(prepared.train.tokens, IDS)
    np.testing.assert_array_equal(prepared.validation.tokens, VALIDATION)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match="one has token ids and one text"):
        load_corpus(train, tmp_path / "cache", validation=str(tmp_path / "a.txt"))


def test_ids_of_an_original_tokenizer_become_those_of_the_model(tmp_path):
    ids = np.arange(300, dtype="<u2") % 257
    ids.tofile(tmp_path / "train.bin")
    order = tuple(np.roll(np.arange(257), 1).tolist())
    tokenizer = Tokenizer.__new__(Tokenizer)
    fields = {"tokens": ("a",) * 256, "vocab_size": 257, "original": "x", "original_ids": order}
    for name, value in (fields | {"merges": (), "chat_template": None}).items():
        object.__setattr__(tokenizer, name, value)
    object.__setattr__(tokenizer, "content_hash", "h" * 64)
    corpus = load_corpus(str(tmp_path / "train.bin"), tmp_path / "cache")
    prepared = prepare_tokens(corpus, tokenizer, tmp_path / "cache")
    np.testing.assert_array_equal(np.asarray(order)[everything(prepared)], ids)


@pytest.mark.parametrize("size", [50256, 300])
def test_ids_out_of_range_are_refused(tmp_path, size):
    nanogpt(tmp_path)
    corpus = load_corpus(str(tmp_path), tmp_path / "cache")
    with pytest.raises(UserError, match=rf"token id 50256, and its tokenizer has {size:,} tokens"):
        prepare_tokens(corpus, id_tokenizer(size), tmp_path / "cache")


@pytest.mark.parametrize(
    "written, damage, message",
    [
        (llm_c, lambda data: data[:-2], r"has 7,022 bytes; legal: 1024 \+ 2"),
        (nanogpt, lambda data: data[:-1], r"has 5,999 bytes"),
        (nanogpt, lambda data: b"", r"has 0 bytes"),
        (megatron, lambda data: data[:-4], r"index says 3,000 token ids"),
        (parquet, lambda data: data[: len(data) // 2], r"a\.parquet cannot be read"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, written, damage, message):
    folder = tmp_path / "ids"
    folder.mkdir()
    written(folder)
    path = next(path for path in sorted(folder.iterdir()) if path.suffix != ".idx")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=message):
        load_corpus(str(folder), tmp_path / "cache")


def test_a_damaged_index_and_other_records_are_refused(tmp_path):
    megatron(tmp_path)
    (tmp_path / "my_text_document.idx").write_bytes(b"MMIDIDX\x00\x00" + b"\x02" * 40)
    with pytest.raises(UserError, match="no index of Megatron-LM"):
        load_corpus(str(tmp_path), tmp_path / "cache")
    folder = tmp_path / "records"
    folder.mkdir()
    writer = ArrayRecordWriter(str(folder / "a.array_record"), "group_size:1")
    example = tf_example_pb2.Example()
    example.features.feature["label"].int64_list.value.append(1)
    writer.write(example.SerializeToString())
    writer.close()
    with pytest.raises(UserError, match=r"Record 0 .* has no token ids; its features: label"):
        load_corpus(str(folder), tmp_path / "cache")


def test_negative_ids_are_refused(tmp_path):
    pq.write_table(pa.table({"input_ids": [[1, 2], [-100]]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"token ids from -100 to 2; legal: 0 or more"):
        load_corpus(str(tmp_path), tmp_path / "cache")


def test_parquet_with_text_and_ids_is_text_unless_the_ids_are_named(tmp_path):
    rows = [{"text": f"a{n}", "input_ids": [n] * 30} for n in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert load_corpus(str(tmp_path), tmp_path / "cache").ids is None
    assert load_corpus(str(tmp_path), tmp_path / "cache", column="input_ids").ids


def test_the_tokenizer_must_be_told(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "FOLDER", tmp_path / "cache")
    nanogpt(tmp_path)
    config = preset("pico").change(data__corpus=str(tmp_path))
    corpus = corpus_of(config.data)
    with pytest.raises(UserError, match=r"no text to train a tokenizer on; legal for data\.tok"):
        tokenizer_of(config, corpus)
    assert tokenizer_of(config.change(data__tokenizer="gpt2"), corpus).vocab_size == 50257
    config = config.change(data__tokenizer="none", model__vocab_size=50304)
    assert tokenizer_of(config, corpus).vocab_size == 50304
    text = tmp_path / "a"
    text.mkdir()
    (text / "a.txt").write_text("some text\n" * 99)
    with pytest.raises(UserError, match=r"data\.tokenizer=none is for a corpus of token ids"):
        tokenizer_of(config, corpus_of(DataConfig(str(text))))


def test_an_unknown_tokenizer_counts_tokens_and_has_no_text(tmp_path):
    unknown = id_tokenizer(300)
    assert unknown.token_bytes.tolist() == [1] * 299 + [0]
    assert unknown.encode("").tolist() == [] and not unknown.has_text
    assert unknown.token_to_bytes(5) == b"" and isinstance(unknown.decode([1, 2, 299]), str)
    unknown.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "tokenizer.json") == unknown
    assert json.loads((tmp_path / "tokenizer.json").read_text())["vocab_size"] == 300


WIDTHS = ["<u2", "<i4", "<u4", "<i8", "<u8"]


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("size", [4, 300, 50257, 65536, 150000, 262144])
def test_the_width_of_ids_without_a_header_is_seen_or_asked_for(tmp_path, dtype, size, caplog):
    """Never are other ids read than were written."""
    ids = (np.random.default_rng(size).integers(0, size, 20000) * (np.arange(20000) % 3 > 0)) % size
    if size > 65536 and dtype == "<u2":
        pytest.skip("they do not fit")
    ids.astype(dtype).tofile(tmp_path / "train.bin")
    try:
        read = load_corpus(str(tmp_path), tmp_path.parent / "cache").ids
    except UserError as error:
        assert "a name with uint8" in str(error)
        (tmp_path / "train.bin").rename(tmp_path / f"train.uint{8 * int(dtype[2])}.bin")
        read = load_corpus(str(tmp_path), tmp_path.parent / "cache").ids
    np.testing.assert_array_equal(np.concatenate([read.train[:], read.validation[:]]), ids)
    assert dtype == "<u2" or "uint" in caplog.text + str(list(tmp_path.iterdir()))


def test_ids_of_one_byte_are_asked_for(tmp_path):
    text = ("to be or not to be, that is the question: é " * 400).encode()
    (tmp_path / "train.bin").write_bytes(text)
    with pytest.raises(UserError, match="ids of 1 byte"):
        load_corpus(str(tmp_path), tmp_path.parent / "cache")
    (tmp_path / "train.bin").rename(tmp_path / "train_uint8.bin")
    read = load_corpus(str(tmp_path), tmp_path.parent / "cache").ids
    assert bytes(np.concatenate([read.train[:], read.validation[:]])) == text


@pytest.mark.parametrize(
    ("sizes", "starts", "count"),
    [
        ((-500, 1500), (0, -1000), 2),
        ((500, 500), (0, 1000), 2**40),
        ((500, 500), (0, 999), 2),
        ((500, 501), (0, 1000), 2),
    ],
)
def test_an_index_that_contradicts_its_file_is_refused(tmp_path, sizes, starts, count):
    (tmp_path / "train.bin").write_bytes(b"\1\0" * 1000)
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, count, 1)
    tail = np.array(sizes, "<i4").tobytes() + np.array([*starts, 0], "<i8").tobytes()
    (tmp_path / "train.idx").write_bytes(head + tail)
    with pytest.raises(UserError, match=r"no index of Megatron|copy both files"):
        load_corpus(str(tmp_path), tmp_path.parent / "cache")


def test_an_index_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("sparse_dataflow.data.token_files._SEQUENCES", 7)
    megatron(tmp_path)
    corpus = load_corpus(str(tmp_path), tmp_path / "cache")
    assert len(corpus.ids.train) + len(corpus.ids.validation) == len(IDS)
