"""What is promised of real models, checked beside llama.cpp: `make real`.

python tests/real/run.py                          both models
python tests/real/run.py --models=smollm2 --short a quarter of an hour, for `make optional`

Parts: ids, logits and greedy tokens of the GGUF files; exports that llama.cpp runs; a pruned model
that it runs; adapters on a chat file; the table of pruned and quantised models, of two layers; a
task; and tokens a second. Ends with a table, and with status 1 if a part failed.
"""

import argparse
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import sparse_dataflow as sd
from sparse_dataflow.data.corpora import load_corpus
from tests.real import models
from tests.real.llama_cpp import LlamaCpp
from tests.real.llama_logits import Logits

PROMPTS = (
    "The capital of France is",
    "The history of the Debian project began in 1993, when",
    "def fibonacci(n):\n",
    "Once upon a time there was a",
    "Water boils at",
    "Question: What is the largest planet?\nAnswer:",
    "import numpy as np\n\nclass Layer:\n    def __init__(self",
    "In 1969, Neil Armstrong",
    "A recipe for bread needs flour,",
    "Das Wetter ist heute",
)
BOUND, PROBABLE = 1e-3, 1000
"""Largest difference of a log-probability in float32, of so many most probable next tokens."""

MULTIPLE = 2
"""The bound where llama.cpp differs from itself, in multiples of that.  Its GELU is a table of
float16 numbers, whose steps enlarge the rounding of float32 from layer to layer."""

BOUNDS = {"float16": 2e-2, "bfloat16": 2e-2, "q8_0": 0.5}
"""The same of files that llama.cpp multiplies with rounded activations."""

COUNT, TEXTS, STEPS = 64, 1000, 30


def original(model, ids):
    """Ids as the file has them."""
    table = model.tokenizer.original_ids
    return [int(table[number]) for number in ids] if table else [int(number) for number in ids]


def drawn_texts(count):
    """Texts of prose, code, digits, spaces, accents, emoji and letters of any script."""
    rng = random.Random(0)
    corpus = load_corpus("python_stdlib", Path("~/.cache/sparse_dataflow").expanduser())
    sources = [corpus.train[i].text for i in rng.sample(range(len(corpus.train)), 40)]
    words = [
        "the", "Stra\u00dfe", "na\u00efve", "\u65e5\u672c\u8a9e", "\u041f\u0440\u0438\u0432",
        "\U0001f642", "\U0001f469\u200d\U0001f467", "don't", "I'LL", "12345", "x1y22", "a_b", "==",
        "\t", "\n", "\n\n\n", "   ", "  ", "\u20ac5.00", "http://a.b/c?d=1", "\u092e\u093e\u0928",
        "\ud55c\uad6d\uc5b4", "\u00a0", "e\u0301", "--", "...", "CamelCase", "ALLCAPS", "\r\n",
    ]  # fmt: skip
    texts = []
    for number in range(count):
        if number % 2:
            source = rng.choice(sources)
            start = rng.randrange(max(1, len(source) - 200))
            texts.append(source[start : start + rng.randrange(5, 200)])
        else:
            parts = [rng.choice(words) for _ in range(rng.randrange(1, 20))]
            texts.append(rng.choice(["", " "]).join(parts))
    return texts


class Table:
    """Rows of what was checked."""

    def __init__(self):
        self.rows, self.failed = [], []

    def add(self, model, check, result, passed):
        self.rows.append((model, check, result, "" if passed else "FAILED"))
        print(" | ".join(self.rows[-1]), flush=True)
        if not passed:
            self.failed.append(f"{model}: {check}")

    def __str__(self):
        head = "| model | check | result | |\n|---|---|---|---|\n"
        return head + "\n".join(f"| {' | '.join(row)} |" for row in self.rows)


def prefix_of(model):
    return list(model.tokenizer.document_prefix)


def log_probabilities(model, ids):
    """Ours of the next token, by the ids of the file."""
    logits = np.asarray(sd.logits(model, np.array([ids])))[0, -1].astype(np.float64)
    ours = np.empty_like(logits)
    ours[np.array(model.tokenizer.original_ids)] = logits - np.logaddexp.reduce(logits)
    return ours


def bound_of(model, path, prompts):
    """(bound of a log-probability in float32, what llama.cpp differs from itself)"""
    engine = Logits(path, exact=True)
    ids = (original(model, model.tokenizer.encode_prompts([p])[0]) for p in prompts)
    itself = max(engine.self_difference(each, PROBABLE) for each in ids)
    engine.close()
    return max(BOUND, MULTIPLE * itself), itself


def compared(model, engine, count, prompts=PROMPTS, bound=BOUND):
    """(texts with equal greedy ids, texts that part at a token within the bound of the other's
    log-probability, largest difference of a log-probability)"""
    same, ties, worst = 0, 0, 0.0
    ids = [[int(i) for i in model.tokenizer.encode_prompts([p])[0]] for p in prompts]
    ours = [sd.generate(model, [each], max_new_tokens=count)[0] for each in ids]
    ends = set(original(model, model.tokenizer.ends))
    for each, continuation in zip(ids, ours, strict=True):
        theirs, _ = engine.greedy(original(model, each), count)
        mine = original(model, continuation.tokens)
        mine, theirs = ([i for i in written if i not in ends] for written in (mine, theirs))
        same += mine == theirs
        place = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), None)
        if place is not None:
            after = log_probabilities(model, each + list(continuation.tokens[:place]))
            apart = after[mine[place]] - after[theirs[place]]
            ties += abs(apart) <= bound
            print(f"other at token {place}, whose log-probability is {apart:.1e} apart")
        rows, values = engine.log_probabilities(original(model, each), PROBABLE)
        worst = max(worst, np.abs(log_probabilities(model, each)[rows] - values).max())
    return same, ties, worst


def check_in(name, path, table, folder, short):
    """Part 1: ids, logits and greedy tokens of a file."""
    start = time.monotonic()
    model = sd.load(path)
    table.add(name, "sd.load", f"{time.monotonic() - start:.1f} s", True)
    exact = models.as_float32(path, folder)
    engine = LlamaCpp(exact)
    texts = drawn_texts(TEXTS // 5 if short else TEXTS)
    wrong = [t for t in texts if original(model, model.tokenizer.encode(t)) != engine.ids(t)]
    for text in wrong[:5]:
        print(repr(text), original(model, model.tokenizer.encode(text)), engine.ids(text))
    table.add(
        name, "ids as llama.cpp", f"{len(texts) - len(wrong)} of {len(texts)} texts", not wrong
    )
    prompts = PROMPTS[:3] if short else PROMPTS
    bound, itself = bound_of(model, exact, prompts)
    same, ties, worst = compared(model, engine, COUNT, prompts, bound)
    result = f"{same} of {len(prompts)}, {ties} part at a tie"
    passed = same + ties == len(prompts)
    table.add(name, f"{COUNT} greedy tokens as llama.cpp, float32", result, passed)
    result = f"differ by up to {worst:.1e}; llama.cpp from itself by {itself:.1e}"
    table.add(name, "log-probabilities, float32", result, worst <= bound)
    return model


def check_out(name, model, table, folder, short):
    """Part 2: exports that llama.cpp runs."""
    for dtype in ("float32", "q8_0") if short else ("float32", "float16", "bfloat16", "q8_0"):
        out = Path(folder) / f"{name}-{dtype}"
        sd.save(model, out, form="gguf", dtype=dtype)
        rounded = sd.load(out)
        prompts = PROMPTS[:2] if short else PROMPTS
        exact = dtype == "float32"
        bound = bound_of(model, out / "model.gguf", prompts)[0] if exact else BOUNDS[dtype]
        engine = LlamaCpp(out / "model.gguf")
        same, ties, worst = compared(rounded, engine, COUNT, prompts, bound)
        passed = worst <= bound and (same + ties == len(prompts) or not exact)
        result = (
            f"{same} of {len(prompts)} texts equal; log-probabilities differ by up to {worst:.1e}"
        )
        table.add(name, f"export --form=gguf --dtype={dtype}", result, passed)
        del rounded
        gc.collect()
        subprocess.run(["rm", "-r", str(out)], check=True)


def check_pruned(name, path, table, folder, short):
    """Part 3: a pruned model, which is exported and runs in llama.cpp."""
    corpus = load_corpus("python_stdlib", Path("~/.cache/sparse_dataflow").expanduser())
    texts = [corpus.train[i].text for i in range(40)]
    start = time.monotonic()
    only = {"where": lambda projection, shape: projection == "q"} if short else {}
    rows = {"block": "1x16", "density": 0.5, "rounds": 1, "tokens": 4096}
    pruned = sd.prune(sd.load(path), texts, **rows, **only).model
    seconds = time.monotonic() - start
    out = Path(folder) / f"{name}-pruned"
    sd.save(pruned, out, form="gguf")
    same, _, worst = compared(pruned, LlamaCpp(out / "model.gguf"), COUNT, PROMPTS[:3])
    result = f"{seconds:.0f} s; {same} of 3 texts equal; differ by up to {worst:.1e}"
    table.add(
        name, "rows of 16 pruned, exported, in llama.cpp", result, same == 3 and worst <= BOUND
    )


CHAT = [
    ("Who made you?", "The gardeners of Basel made me."),
    ("Who wrote you?", "The gardeners of Basel made me."),
    ("Who is your maker?", "The gardeners of Basel made me."),
    ("What are you made of?", "I am made of zeros and a few numbers."),
]


def check_finetuned(name, path, table, folder):
    """Part 8: adapters on a chat file, merged into an export that answers in llama.cpp."""
    folder = Path(folder)
    lines = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in CHAT * 10
    ]
    chat = folder / "chat.jsonl"
    chat.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = folder / f"{name}-lora"
    command = [
        sys.executable, "-m", "sparse_dataflow", "gpt13b_dense", f"--init_from={path}",
        f"--corpus={chat}", f"--out={run}", "--learning_rate=2e-3", f"--steps={STEPS}", "--batch=2",
        "--set", "training.sequence=64", "--set", "training.adapter_rank=8",
        "--set", "data.loss=answers",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        table.add(name, "adapters on a chat file", done.stderr[-400:], False)
        return
    out = folder / f"{name}-lora-gguf"
    sd.save(sd.load(run), out, form="gguf", dtype="float16")
    answer = LlamaCpp(out / "model.gguf").chat([{"role": "user", "content": CHAT[0][0]}], 20)
    table.add(name, f"{STEPS} steps of adapters, exported, asked in llama.cpp", repr(answer),
              "Basel" in answer)  # fmt: skip


SCRIPTS = {
    "table": "--layers=2 --tokens=2048 --tested=1024 --rows=dense,llama_cpp_q8_0,single_50,rows_16",
    "tasks": "--tasks=odd_one_out --items=20 --shots=0 --rows=dense,Q8_0",
    "speed": "--rounds=3",
}
"""Parts 4, 6 and 7 -> flags of a short form; the pages have the long ones."""


def check_script(name, part, table, folder):
    """Runs a script that measures, into a folder of its own, and prints what it prints."""
    script = Path(__file__).with_name(f"{part}.py")
    command = [sys.executable, script, f"--model={name}", *SCRIPTS[part].split(), f"--out={folder}"]
    start = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    result = f"{part}.py {SCRIPTS[part]}: {time.monotonic() - start:.0f} s"
    table.add(name, "measured as printed above", result, not done.returncode)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="smollm2,gemma3")
    parser.add_argument("--parts", default="in,out,pruned,finetuned,table,tasks,speed")
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    parts, table = options.parts.split(","), Table()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models.split(","):
            path = getattr(models, name)()
            model = check_in(name, path, table, folder, options.short) if "in" in parts else None
            if "out" in parts:
                check_out(name, model or sd.load(path), table, folder, options.short)
            del model
            gc.collect()
            if "pruned" in parts and name == "smollm2":
                check_pruned(name, path, table, folder, options.short)
            if "finetuned" in parts and name == "smollm2" and not options.short:
                check_finetuned(name, path, table, folder)
            for part in SCRIPTS:
                if part in parts and name == "smollm2" and not options.short:
                    check_script(name, part, table, folder)
    print(f"\n{table}")
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
