"""Relations of a trained model: exports, generated text, pruning."""

import importlib.util

import numpy as np

import sparse_dataflow as sd
from sparse_dataflow.commands.training_data import training_data
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import pruned_directory
from sparse_dataflow.runs.variants import variants
from storm.relations import relation
from storm.world import World, check, need


def near(a, b, relative):
    """Whether logits are equal, relative to their largest magnitude."""
    scale = max(1.0, float(np.abs(a).max()))
    return a.shape == b.shape and bool(np.all(np.abs(a - b) <= relative * scale))


def _sane(world):
    logits = world.logits(world.model, world.tokens())
    need(np.all(np.isfinite(logits)), "the model diverged")
    return logits


def _tolerance(model, dtype="float32"):
    narrow = model.model.compute_dtype != "float32" or dtype != "float32"
    return 3e-2 if narrow else 2e-5


@relation(5)
def exports_have_the_same_logits(world: World):
    """Every form, saved and loaded: the logits of the model of the run."""
    logits, model, tokens = _sane(world), world.model, world.tokens()
    form = world.draw("export").choice(["dense", "sparse", "gguf"])
    dtype = world.draw("dtype").choice(["float32", "float32", "bfloat16"])
    folder = world.folder / f"export-{form}"
    try:
        sd.save(model, folder, form, dtype=dtype)
    except UserError as error:
        check(not folder.exists(), f"the refused form {form} left {folder.name}")
        need(False, f"refused: {error}")
    loaded = sd.load(folder)
    check(
        near(world.logits(loaded, tokens), logits, _tolerance(model, dtype)),
        f"the form {form} in {dtype} has other logits: "
        f"{np.abs(world.logits(loaded, tokens) - logits).max():.3g} of {np.abs(logits).max():.3g}",
    )
    if model.tokenizer.has_text:
        texts = world.places.texts("folder")[:4]
        for text in texts:
            check(
                loaded.tokenizer.decode(loaded.tokenizer.encode(text))
                == model.tokenizer.decode(model.tokenizer.encode(text)),
                f"the tokenizer of the form {form} reads {text[:50]!r} as another text",
            )
            check(
                np.array_equal(loaded.tokenizer.encode(text), model.tokenizer.encode(text)),
                f"the tokenizer of the form {form} has other ids of {text[:50]!r}",
            )


@relation(8)
def programs_generate_the_same(world: World):
    """Exported programs: the tokens of `generate`."""
    logits, model = _sane(world), world.model
    folder = world.folder / "export-program"
    try:
        sd.save(model, folder, "program")
    except UserError as error:
        check(not folder.exists(), f"the refused form program left {folder.name}")
        need(False, f"refused: {error}")
    spec = importlib.util.spec_from_file_location("run_in_jax", folder / "run_in_jax.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # A program has the ids of its tokenizer.json.
    own = np.asarray(model.tokenizer.ids_from_original)
    prompts = [[int(i) for i in row[:4]] for row in world.tokens()]
    written = module.Model(folder).generate(prompts, 6)
    for prompt, row in zip(prompts, written, strict=True):
        full = own[np.array([[*prompt, *row.tolist()]])]
        _is_greedy(world, model, full, len(prompt), _tolerance(model), "a program")
    del logits


def _is_greedy(world, model, full, start, tolerance, words):
    """Fails where tokens are not the most likely ones, unless others are about as likely."""
    width = 16  # One shape for all.
    padded = np.zeros((full.shape[0], max(width, full.shape[1])), np.int32)
    padded[:, : full.shape[1]] = full
    padded = padded[:, : model.model.longest]
    logits = world.logits(model, padded)
    for row, ids in zip(logits, full, strict=True):
        # Rotary positions have no end, so a program may write past the model's context.
        for place in range(start, min(len(ids), len(row) + 1)):
            best, chosen = row[place - 1].max(), row[place - 1][ids[place]]
            scale = max(1.0, float(np.abs(row[place - 1]).max()))
            check(
                chosen >= best - 2 * tolerance * scale,
                f"{words} wrote the token {ids[place]} at place {place}, with the logit "
                f"{chosen:.5g} where the largest is {best:.5g}",
            )


@relation(4)
def generated_tokens_are_the_most_likely(world: World):
    """Greedy decoding through the cache: the tokens of the full forward pass, in any batch."""
    _sane(world)
    model, tokens = world.model, world.tokens(3, 5)
    need(model.context > 4, "no room for the prompts")
    need(not model.model.bidirectional, "a model that generates nothing")
    prompts = [[int(i) for i in row[: 2 + n]] for n, row in enumerate(tokens)]
    together = sd.generate(model, prompts, max_new_tokens=6)
    for number, (prompt, continuation) in enumerate(zip(prompts, together, strict=True)):
        full = np.array([[*prompt, *continuation.tokens]])
        _is_greedy(world, model, full, len(prompt), _tolerance(model), "generate")
        del number


@relation(4)
def streamed_text_is_the_whole_text(world: World):
    """Text that comes token by token, and that of a prompt alone."""
    _sane(world)
    model, draw = world.model, world.draw("text")
    need(model.tokenizer.has_text, "no text")
    prompts = [text[:9] for text in world.places.texts("folder")[:2]]
    pieces = ["", ""]

    def add(index, text):
        pieces[index] += text

    options = {
        "max_new_tokens": 7,
        "temperature": draw.choice([0.0, 1.0, 3.0]),
        "top_k": draw.choice([0, 5]),
        "top_p": draw.choice([1.0, 0.9]),
        "stop": draw.choice([(), ("e",), (" t", "\n")]),
        "seed": [draw.randrange(100), draw.randrange(100)],
    }
    try:
        whole = sd.generate(model, prompts, on_token=add, **options)
    except UserError as error:
        need(False, f"refused: {error}")
    for number, (piece, continuation) in enumerate(zip(pieces, whole, strict=True)):
        check(piece == continuation.text, f"streamed {piece!r}, whole {continuation.text!r}")
        for stop in options["stop"]:
            check(stop not in continuation.text, f"{continuation.text!r} has the stop {stop!r}")
        if not model.model.experts:
            alone = sd.generate(
                model,
                prompts[number : number + 1],
                **{**options, "seed": [options["seed"][number]]},
            )[0]
            check(
                alone.text == continuation.text or options["temperature"] == 0.0,
                f"alone {alone.text!r}, beside another prompt {continuation.text!r}",
            )


@relation(8)
def interrupted_pruning_is_uninterrupted(world: World):
    """`sd.prune(out=)` that is interrupted after a layer and called again: the same bytes."""
    _sane(world)
    model, draw = world.model, world.draw("prune")
    if world.config.sparsity.projections:
        # It is pruned already, so the model of the storm takes its place.
        model = sd.load(world.shared / "dense")
    size = model.tokenizer.vocab_size
    batch = np.random.default_rng(0).integers(0, size, (8, min(16, model.model.longest)), np.int32)
    options = {
        "block": draw.choice([8, 8, "2:4", 1, "1x8"]),
        "rounds": draw.choice([1, 2]),
        "dtype": draw.choice(["float32", "bfloat16"]),
    }
    folder = world.folder / "pruned"
    try:
        sd.prune(model, [batch], out=folder, **options)
    except UserError as error:
        need(False, f"refused: {error}")
    again, put, count = world.folder / "pruned again", pruned_directory.PrunedDirectory.put, [0]

    def interrupted(directory, layer, stored):
        put(directory, layer, stored)
        count[0] += 1
        if count[0] == 1:
            raise KeyboardInterrupt

    pruned_directory.PrunedDirectory.put = interrupted
    try:
        sd.prune(model, [batch], out=again, **options)
    except KeyboardInterrupt:
        pass
    finally:
        pruned_directory.PrunedDirectory.put = put
    need(not again.exists(), "one layer")
    sd.prune(model, [batch], out=again, **options)
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "README.md":
            other = again / path.relative_to(folder)
            check(other.exists(), f"{path.name} is missing")
            check(other.read_bytes() == path.read_bytes(), f"{path.name} has other bytes")
    before, after = sd.load(folder), sd.load(again)
    tokens = world.tokens()
    check(
        near(world.logits(before, tokens), world.logits(after, tokens), 0),
        "the pruned models differ",
    )


@relation(3)
def initial_weights_keep_their_function(world: World):
    """The evaluation before the first step: the loss of the weights that the run begins with."""
    config = world.config
    need(config.run.init_from and not config.data.extend_vocabulary, "no given weights")
    run = world.run
    base = sd.load(config.run.init_from, config.run.init_variant)
    first = variants(config, base.tokenizer.vocab_size)[0]
    begins = first.phase_specs[0].model
    same = {name: begins.linear(name) for name in begins.projections}
    need(
        begins.projections == base.model.projections
        and all(
            (spec.kind, spec.density) == (base.model.linear(n).kind, base.model.linear(n).density)
            for n, spec in same.items()
        ),
        "pruned at the start",
    )
    log = [row for row in run.metrics() if row["kind"] == "eval" and row["step"] == 0]
    need(log, "no evaluation before the first step")
    data = training_data(config, first, world.corpus(), base.tokenizer)
    logged = log[0]["loss"]
    total = weight = 0.0
    for batch in data.validation:
        logits = world.logits(base, batch.tokens)
        logits -= logits.max(-1, keepdims=True)
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        chosen = np.take_along_axis(logs, batch.targets[..., None], -1)[..., 0]
        total -= float((chosen * batch.token_weights).sum())
        weight += float(batch.token_weights.sum())
    need(not data.mixture and not config.model.mask_documents, "another loss")
    check(
        abs(total / weight - logged) <= (3e-2 if _narrow(config) else 2e-4) * abs(logged),
        f"the loss before the first step is {logged:.6f}, that of the given weights "
        f"{total / weight:.6f}",
    )


def _narrow(config):
    return config.model.compute_dtype != "float32" or config.model.quantized
