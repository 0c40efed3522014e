"""Tokenizers of published models import, encode, generate and export as the library's do."""

import json
import shutil

import numpy as np
import pytest
import tokenizers
from make_fixture import FOLDERS
from published_tokenizers import PUBLISHED, folder
from safetensors.numpy import load_file, save_file

import sparse_dataflow as sd

TEXTS = [
    "Hello world", "the cat's 12345 na\u00efve caf\u00e9 \U0001f642 \u65e5\u672c\u8a9e",
    " def f(x):\n\treturn x  # 12", "<start_of_turn>user\n", "a<mask>b", "\n\n\n  x", "",
]  # fmt: skip


@pytest.fixture(params=PUBLISHED)
def published(request, tmp_path):
    """(row, directory): a small model of the family with the tokenizer's files and rows."""
    row, files = PUBLISHED[request.param], folder(request.param)
    if files is None:
        pytest.skip(f"{row.package} is not fetched; `make optional` does")
    place = tmp_path / "model"
    shutil.copytree(FOLDERS[row.family], place)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (place / name).unlink(missing_ok=True)
    for path in files.iterdir():
        shutil.copy(path, place / path.name)
    config = json.loads((place / "config.json").read_text())
    ids = {"vocab_size": row.rows, "eos_token_id": row.ends, "bos_token_id": row.start}
    (place / "config.json").write_text(json.dumps({**config, **ids, "pad_token_id": None}))
    weights = load_file(place / "model.safetensors")
    for name, tensor in weights.items():
        if tensor.shape[:1] == (config["vocab_size"],):
            weights[name] = np.resize(tensor, (row.rows, *tensor.shape[1:]))
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    return row, place


@pytest.mark.slow
def test_a_published_tokenizer_imports_encodes_generates_and_exports(published, tmp_path):
    row, place = published
    model, library = sd.load(place), tokenizers.Tokenizer.from_file(str(place / "tokenizer.json"))
    library.no_padding()
    library.no_truncation()
    tokenizer, order = model.tokenizer, np.asarray(model.tokenizer.original_ids)
    prompt_ids = library.encode("Hello", add_special_tokens=True).ids
    assert order[tokenizer.encode_prompts(["Hello"])[0]].tolist() == prompt_ids
    library.encode_special_tokens = True  # Texts are text: no text encodes to a special token.
    for text in TEXTS:
        expected = library.encode(text, add_special_tokens=False).ids
        assert order[tokenizer.encode(text)].tolist() == expected
        assert tokenizer.decode(tokenizer.encode(text)) == library.decode(
            expected, skip_special_tokens=False
        )
    assert {int(order[i]) for i in tokenizer.ends} == {*np.atleast_1d(row.ends).tolist()}
    stop = ["<end_of_turn>", "<|im_end|>"]
    assert len(sd.generate(model, ["Hello", "\n"], max_new_tokens=3, stop=stop)) == 2
    exported = sd.save(model, tmp_path / "exported", "dense")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (exported / name).read_bytes() == (place / name).read_bytes()
