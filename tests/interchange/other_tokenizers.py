"""Tokenizers that are no BPE of bytes, as protein, chess, Japanese and BERT's models have them."""

import functools
import json

import tokenizers
from base_tokenizers import ENGLISH
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

SPECIALS = ["[UNK]", "[END]"]
RESIDUES = [*"ACDEFGHIKLMNPQRSTVWY"]
MOVES = ["e2e4", "e7e5", "g1f3", "b8c6", "f1b5", "a7a6", "1-0"]
SPACE = "\u2581"


def _word_level(words):
    vocab = {token: number for number, token in enumerate([*SPECIALS, *words])}
    return tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))


def _trained(model, trainer, **steps):
    engine = tokenizers.Tokenizer(model)
    for name, step in steps.items():
        setattr(engine, name, step)
    engine.train_from_iterator(ENGLISH, trainer)
    return engine


def chess():
    engine = _word_level(MOVES)
    engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return engine


def protein():
    engine = _word_level(RESIDUES)
    engine.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    engine.decoder = decoders.Fuse()
    return engine


def unigram(**options):
    # The trainer of the library gives other scores in each run; these depend on the text alone.
    words = {SPACE + word for text in ENGLISH[:3] for word in text.split()}
    ends = {word[-size:] for word in words for size in (2, 3)}
    rows = [(token, 0.0) for token in SPECIALS]
    rows += [(f"<0x{byte:02X}>", -9.0) for byte in range(256 * bool(options))]
    rows += [(token, -float(2 + len(token) % 3)) for token in sorted(words | ends)]
    letters = sorted(set("".join(words)) - {token for token, _ in rows})
    engine = tokenizers.Tokenizer(
        models.Unigram([*rows, *((letter, -8.0) for letter in letters)], 0, bool(options))
    )
    engine.normalizer = normalizers.NFKC()
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    engine.decoder = decoders.Metaspace()
    if options:
        engine.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
             decoders.Strip(" ", 1, 0)]
        )  # fmt: skip
    return engine


def wordpiece():
    return _trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=150, special_tokens=SPECIALS, show_progress=False),
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
    )


def characters():
    """BPE of characters, as ProGen's, that leaves out those it does not know."""
    return _trained(
        models.BPE(),
        trainers.BpeTrainer(vocab_size=90, special_tokens=SPECIALS, show_progress=False),
        decoder=decoders.Fuse(),
    )


def gpt1():
    return _trained(
        models.BPE(unk_token="[UNK]", end_of_word_suffix="</w>"),
        trainers.BpeTrainer(
            vocab_size=160, special_tokens=SPECIALS, end_of_word_suffix="</w>", show_progress=False
        ),
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.BPEDecoder(),
    )


def byte_level_words():
    """Whole words of byte-level text, and each byte for those that are not in the vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rows = [(token, 0.0) for token in SPECIALS] + [(token, -9.0) for token in alphabet]
    words = {"\u0120" + word for word in ENGLISH[0].split()}
    engine = tokenizers.Tokenizer(models.Unigram([*rows, *((w, -1.0) for w in sorted(words))], 0))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    return engine


KINDS = {
    "chess": chess,
    "protein": protein,
    "unigram": unigram,
    "unigram_bytes": functools.partial(unigram, byte_fallback=True),
    "wordpiece": wordpiece,
    "characters": characters,
    "gpt1": gpt1,
    "byte_level_words": byte_level_words,
}

TEXTS = {
    "chess": "e2e4 e7e5 g1f3 1-0",
    "protein": "MKVLAAGDE",
    "characters": "The quick brown fox, and the dog runs home.",
    "gpt1": "the quick brown fox , and the dog runs home .",
    "wordpiece": "the quick brown fox, and the dog runs home.",
}
"""A text of each kind that comes back as it was; ENGLISH[0] of the others."""


@functools.cache
def text_of(kind):
    """Returns the tokenizer.json of a kind, with SPECIALS."""
    engine = KINDS[kind]()
    engine.add_special_tokens(SPECIALS)
    return json.dumps(json.loads(engine.to_str()), indent=1, ensure_ascii=False)


def write(folder, kind):
    """Writes a directory without weights; returns the library's tokenizer and the config."""
    folder.mkdir(parents=True)
    engine = tokenizers.Tokenizer.from_str(text_of(kind))
    config = {
        "vocab_size": engine.get_vocab_size(),
        "eos_token_id": engine.token_to_id("[END]"),
    }
    (folder / "tokenizer.json").write_text(text_of(kind), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config))
    return engine, config
