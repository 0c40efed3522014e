"""Tokenizers of the kinds that published models have, trained by the library on English."""

import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

ENGLISH = [
    "The quick brown fox jumps over the lazy dog, and the dog runs home in 1984.",
    "What is two plus two? It is four, they said; the other answers are wrong.",
    "def main(argument):\n    return argument + 12345  # the sum of the parts\n",
] * 9

HUNGARIAN = [
    "A szépség házában lakó emberek a városokban és a falvakban élnek.",
    "Megszentségteleníthetetlenségeskedéseitekért és egészségünkért!\n\tÉlet 2024-ben.",
    "Az egészséges emberek a házakban és a városokban szépen élnek.",
] * 9
AMHARIC = ["ሰላም ለዓለም ሁሉ ይሁን፤ ሰላም ለሰው ልጆች።", "ሁሉም ሰው ሰላም ይፈልጋል። ሰላም ለሁሉ ይሁን።"] * 9
THAI = ["ภาษาไทยเป็นภาษาที่ไม่มีช่องว่างระหว่างคำ ภาษาไทยสวยงาม"] * 9

GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(name):
    engine = tokenizers.Tokenizer(models.BPE())
    if name == "gpt2":
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = GPT4 if name == "llama3" else GPT4.replace("{1,3}", "")
        engine.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(split), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if name == "qwen":
        engine.normalizer = normalizers.NFC()
    engine.decoder = decoders.ByteLevel()
    first = ["<|endoftext|>"] if name == "gpt2_first" else []
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=first,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(ENGLISH, trainer)
    engine.add_special_tokens(["<|endoftext|>", "<|im_start|>"])
    if name == "qwen":
        engine.add_tokens(["<think>", "</think>"])
    if name == "llama3":
        begin = engine.token_to_id("<|im_start|>")
        engine.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", begin)]
        )
    return json.loads(engine.to_str())


def _byte_fallback(name):
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    engine = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    space = "\u2581"
    train = tokenizers.Tokenizer(models.BPE())
    train.pre_tokenizer = pre_tokenizers.Metaspace(replacement=space, prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=specials, show_progress=False, initial_alphabet=list("éá")
    )
    train.train_from_iterator([text.replace("\n", " ") for text in ENGLISH], trainer)
    model = json.loads(train.to_str())["model"]
    if name == "llama2":
        steps = [normalizers.Prepend(space), normalizers.Replace(" ", space)]
        engine.normalizer = normalizers.Sequence(steps)
        engine.decoder = decoders.Sequence(
            [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(),
             decoders.Strip(" ", 1, 0)]
        )  # fmt: skip
    elif name == "mistral":
        engine.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=space, prepend_scheme="first", split=False
        )
        engine.decoder = decoders.Sequence(
            [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(),
             decoders.Strip(" ", 1, 0)]
        )  # fmt: skip
    else:  # Gemma: no space in front, each space is a mark of its own.
        engine.normalizer = normalizers.Replace(" ", space)
        engine.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        engine.decoder = decoders.Sequence(
            [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    fields = json.loads(engine.to_str())
    flags = {name: fields["model"][name] for name in ("byte_fallback", "unk_token", "fuse_unk")}
    fields["model"] = {**model, **flags}
    fields["added_tokens"] = [
        {"id": n, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for n, token in enumerate(specials[:3])
    ]  # fmt: skip
    return fields


BYTE_LEVEL = ("gpt2", "gpt2_first", "llama3", "qwen")
FALLBACK = ("llama2", "mistral", "gemma")


def fields(name):
    """Returns the fields of a tokenizer.json of the given kind."""
    result = _byte_level(name) if name in BYTE_LEVEL else _byte_fallback(name)
    if name == "llama3":
        result["model"]["ignore_merges"] = True
    if name == "qwen":  # Merges as text, as files of earlier releases have them.
        result["model"]["merges"] = [" ".join(pair) for pair in result["model"]["merges"]]
    return result


def write(folder, name, padding=0):
    """Writes a tokenizer as a directory; returns the library's and the number of its rows."""
    folder.mkdir(parents=True)
    content = fields(name)
    engine = tokenizers.Tokenizer.from_str(json.dumps(content))
    size = max(engine.get_vocab().values()) + 1 + padding
    end = "</s>" if name in FALLBACK else "<|endoftext|>"
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    config = {"vocab_size": size, "eos_token_id": engine.token_to_id(end)}
    (folder / "config.json").write_text(json.dumps(config))
    return engine, size
