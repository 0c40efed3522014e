"""The sweeps of `experiments.growth`, and how each point is measured; loads no jax at import."""

import dataclasses
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BLOCK = 32
"""Largest side of a block."""

ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Points of one size that grows.

    Attributes:
      unit: what is counted.
      sizes: of the points, ascending.
      measure: (size, folder for files) -> name of a quantity -> its value.  Names end in "seconds"
        or "bytes"; "size" replaces the size on the axis.
    """

    unit: str
    sizes: tuple[int, ...]
    measure: Callable[[int, Path], dict[str, float]]


def measured(name: str, size: int) -> dict[str, float]:
    """Returns the quantities of one point; call it in a new process.

    "memory bytes" is the growth of the largest resident memory during the measurement.
    """
    with tempfile.TemporaryDirectory() as folder:
        import jax  # noqa: F401  Its memory is no part of a point.

        before = _peak()
        result = SWEEPS[name].measure(size, Path(folder))
        return {"size": size, **result, "memory bytes": _peak() - before}


def _peak():
    """Returns the largest resident memory of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # On Linux the other number counts what the parent had.
        return 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _seconds(function: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Returns the least processor seconds of a call."""
    return min(_once(function) for _ in range(rounds))


def _once(function):
    start = time.process_time()
    function()
    return time.process_time() - start


def _model(width=256, layers=2, density=0.125, tokens=128):
    from sparse_dataflow.core.config.model import ModelConfig
    from sparse_dataflow.core.config.projections import LinearSpec

    dense = ModelConfig(layers, width, max(1, width // 64), 4 * width, 512, tokens)
    return dense.with_linears(
        LinearSpec("block_sparse", "monarch", density, min(BLOCK, width // 8))
    )


def _step(model, batch=8, cpus=0) -> dict[str, float]:
    """Compiles and runs a training step; its program's bytes are those of a device, by XLA.

    With `cpus` it is sharded over that number of virtual devices of the CPU.
    """
    import jax

    from sparse_dataflow.core.config.training import TrainingConfig
    from sparse_dataflow.core.executors import mesh
    from sparse_dataflow.core.executors.executor import SINGLE_DEVICE
    from sparse_dataflow.core.executors.sharded import Sharded

    from . import steps

    executor = SINGLE_DEVICE
    if cpus:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", cpus)
    if cpus > 1:
        executor = Sharded(mesh.make(mesh.parse(f"fsdp:{cpus}", cpus)))

    training = TrainingConfig(steps=10, batch=batch, sequence=model.max_len, learning_rate=1e-3)
    tokens = steps.random_tokens(model, training)
    start = time.process_time()
    step = steps.compiled_step(model, training, tokens, executor)
    compile_seconds = time.process_time() - start
    run = lambda: jax.block_until_ready(step.run())  # noqa: E731
    run()
    return {
        "step seconds": _seconds(run),
        "compile seconds": compile_seconds,
        "program bytes": float(step.step_bytes or 0),
    }


def _layouts(blocks: int, folder: Path) -> dict[str, float]:
    """Layouts of the shape of 13B, whose tables have about so many blocks."""
    from sparse_dataflow.core.layouts import model_layouts
    from sparse_dataflow.core.model import stacks
    from sparse_dataflow.runs.run_config import preset
    from sparse_dataflow.runs.variants import variant

    model = variant(preset("13b"), "sparse").model
    model = dataclasses.replace(model, num_layers=max(1, blocks // 2400))
    layouts = model_layouts.layouts(model)
    stored = stacks.stored_layouts(model, layouts)
    return {
        "size": float(sum(layout.nnz for layers in layouts.values() for layout in layers)),
        "layouts seconds": _seconds(lambda: model_layouts.layouts(model)),
        "tables seconds": _seconds(lambda: stacks.stored_layouts(model, layouts)),
        "layouts of tables seconds": _seconds(lambda: stacks.layouts_of(model, stored)),
    }


def _pruning(blocks: int, folder: Path) -> dict[str, float]:
    """The choice of an eighth of the blocks of one weight: the best, and the best order."""
    import numpy as np

    from sparse_dataflow.core.layouts.balance import balanced_top

    side = round((blocks / 4) ** 0.5)
    scores = np.random.default_rng(0).random((side, 4 * side))
    return {"balanced choice seconds": _seconds(lambda: balanced_top(scores, side // 8, side // 2))}


def _feature_order(width: int, folder: Path) -> dict[str, float]:
    import jax
    import numpy as np

    from sparse_dataflow.core.layouts import model_layouts
    from sparse_dataflow.core.model import gpt
    from sparse_dataflow.interchange import feature_order

    sparse = _model(width)
    dense = dataclasses.replace(sparse, linears={})
    params = jax.tree.map(np.asarray, gpt.init(dense, jax.random.key(0)))
    layouts = model_layouts.layouts(sparse)
    search = lambda: feature_order.search(dense, params, layouts)  # noqa: E731
    return {"size": float(12 * 2 * width**2), "feature order seconds": _seconds(search, 1)}


def _checkpoint(arrays: dict[str, Any], folder: Path) -> dict[str, float]:
    import jax
    import numpy as np

    from sparse_dataflow.core.checkpoint.checkpoint import Checkpoints

    state = jax.tree.map(jax.numpy.asarray, arrays)
    numbers = iter(range(ROUNDS))
    with Checkpoints(folder / "checkpoints", config={}) as checkpoints:

        def save():
            checkpoints.save(next(numbers), state, {})
            checkpoints.wait()

        saving = _seconds(save)
        shapes = jax.tree.map(lambda leaf: np.empty_like(leaf), arrays)
        return {
            "save seconds": saving,
            "restore seconds": _seconds(lambda: checkpoints.restore(shapes)),
        }


def _bytes_saved(size: int, folder: Path) -> dict[str, float]:
    import numpy as np

    return _checkpoint({f"w{n}": np.ones(size // 32, np.float32) for n in range(8)}, folder)


def _leaves_saved(size: int, folder: Path) -> dict[str, float]:
    import numpy as np

    return _checkpoint({f"w{n}": np.ones(64, np.float32) for n in range(size)}, folder)


def _planned(chips: int, folder: Path) -> dict[str, float]:
    from sparse_dataflow.hardware.chips import CHIPS
    from sparse_dataflow.planner import search
    from sparse_dataflow.runs.run_config import preset
    from sparse_dataflow.runs.variants import variant

    model = variant(preset("175b"), "sparse").model
    request = search.Request(model, model.max_len, 1536, CHIPS["tpu-v5p"], chips)
    priced = search.price(request)
    return {
        "plans": float(priced.seconds.size),
        "planner seconds": _seconds(lambda: search.price(request)),
    }


def _words(size: int) -> Iterator[str]:
    """Yields texts of about 2,000 letters whose words have the frequencies of a language."""
    import numpy as np

    rng = np.random.default_rng(0)
    letters = rng.integers(97, 123, (20_000, 8)).astype(np.uint8)
    words = [bytes(row[: 2 + number % 7]).decode() for number, row in enumerate(letters)]
    for _ in range(size // 2000):
        ranks = np.minimum(rng.pareto(1.0, 400) * 20, len(words) - 1).astype(int)
        yield " ".join(words[rank] for rank in ranks)


def _tokenizer(size: int, folder: Path) -> dict[str, float]:
    from sparse_dataflow.data.tokenizer import Tokenizer

    texts = list(_words(size))
    tokenizer = Tokenizer.from_texts(texts, 4096)
    return {
        "size": float(sum(map(len, texts))),
        "training of a tokenizer seconds": _seconds(lambda: Tokenizer.from_texts(texts, 4096), 1),
        "encoding seconds": _seconds(lambda: tokenizer.encode_batch(texts)),
    }


def _loaded(corpus: Path, folder: Path) -> dict[str, float]:
    """The first load stores a corpus, and the next one opens it."""
    from sparse_dataflow.data.corpora import load_corpus

    cache, (warm, warm_file) = folder / "cache", (folder / "warm", folder / "warm" / "a.txt")
    warm.mkdir()
    warm_file.write_text("one line\n" * 100)
    load_corpus(str(warm), cache)  # Imports what the first corpus of a process does.
    return {
        "storing seconds": _once(lambda: load_corpus(str(corpus), cache)),
        "opening seconds": _seconds(lambda: load_corpus(str(corpus), cache)),
    }


def _documents(size: int, folder: Path) -> dict[str, float]:
    import json

    corpus = folder / "corpus.jsonl"
    with corpus.open("w") as file:
        for number in range(size):
            file.write(json.dumps({"text": f"the document {number} has a number"}) + "\n")
    return _loaded(corpus, folder)


def _files(size: int, folder: Path) -> dict[str, float]:
    corpus = folder / "corpus"
    for number in range(size):
        path = corpus / f"{number // 1000}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"the file {number} has a number\n")
    return _loaded(corpus, folder)


def _metrics(size: int, folder: Path) -> dict[str, float]:
    import json

    from sparse_dataflow.monitoring.metrics import MetricsWriter, read_metrics
    from sparse_dataflow.reporting import watch_page

    names = ("tokens", "seconds", "learning_rate", "gradient_norm", "tokens_per_second")
    path = folder / "metrics.jsonl"
    with path.open("w") as file:
        for step in range(1, size + 1):
            row = {"kind": "train", "step": step, "loss": 2 + 1 / step, **dict.fromkeys(names, 1.0)}
            file.write(json.dumps(row | {"seconds": 0.1 * step}) + "\n")
    rows = read_metrics(path)
    run = watch_page.WatchedRun("run", {"sparse": size}, {"sparse": rows}, "", [], "none yet")
    page = lambda: watch_page.content([run], [], 0)  # noqa: E731
    page()  # Imports the drawing.
    return {
        "reading metrics seconds": _seconds(lambda: read_metrics(path)),
        "reopening metrics seconds": _once(lambda: MetricsWriter(folder, size).close()),
        "watch page seconds": _seconds(page),
    }


SWEEPS = {
    "width": Sweep("d_model", (256, 512, 1024, 2048), lambda n, _: _step(_model(width=n))),
    "depth": Sweep("layers", (2, 4, 8, 16, 32), lambda n, _: _step(_model(128, layers=n))),
    "tokens": Sweep(
        "sequences of 128 tokens", (2, 4, 8, 16, 32), lambda n, _: _step(_model(), batch=n)
    ),
    "sequence": Sweep(
        "tokens of one sequence",
        (256, 512, 1024, 2048),
        lambda n, _: _step(_model(128, tokens=n), batch=1),
    ),
    "density": Sweep(
        "sixteenths of the blocks",
        (1, 2, 4, 8),
        lambda n, _: _step(_model(512, density=n / 16)),
    ),
    "devices": Sweep("devices of a mesh", (1, 2, 4, 8), lambda n, _: _step(_model(), cpus=n)),
    "layouts": Sweep("stored blocks", (24_000, 96_000, 384_000, 1_536_000), _layouts),
    "pruning": Sweep("blocks of a weight", (4096, 16_384, 65_536), _pruning),
    "feature order": Sweep("weights", (128, 256, 512, 1024), _feature_order),
    "checkpoint": Sweep("bytes", (2**24, 2**26, 2**28), _bytes_saved),
    "leaves": Sweep("arrays of a checkpoint", (32, 128, 512, 2048), _leaves_saved),
    "chips": Sweep("chips", (64, 256, 1024, 4096), _planned),
    "text": Sweep("letters", (2**20, 2**22, 2**24), _tokenizer),
    "documents": Sweep("documents", (4000, 16_000, 64_000), _documents),
    "files": Sweep("files", (1000, 4000, 16_000), _files),
    "metrics": Sweep("rows of metrics", (10_000, 40_000, 160_000), _metrics),
}
"""Name -> sweep."""
