"""Layers need the core requirements alone, and what needs more names the extra that has it."""

import ast
import configparser
import re
import subprocess
import sys

import pytest
from marks import some
from places import ROOT

from sparse_dataflow.files import extras

MODULES = {"absl-py": "absl", "orbax-checkpoint": "orbax", "lm-eval": "lm_eval"}
"""Packages whose module has another name, besides - and _."""

BLOCKED = f"""
import sys
import jax, flax, optax, scipy  # What these import themselves is not ours.
from flax import nnx
before = set(sys.modules)

class Blocked:
    def find_spec(name, path, target=None):
        if name.partition(".")[0] in {set(extras.MODULES["train"])!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked)
for name in {extras.MODULES["train"]!r}:
    [sys.modules.pop(m) for m in list(sys.modules) if m.partition(".")[0] == name]
import jax.numpy as jnp
import sparse_dataflow as sd
"""

LAYERS = """
model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.Linear(64, 64, rngs=nnx.Rngs(1)))
sparse = sd.sparsify(model, density=0.25, block=16, evolving=True)
optimizer = nnx.Optimizer(sparse, optax.adam(1e-3), wrt=nnx.Param)
loss = lambda model, x: jnp.mean(model(x) ** 2)
x = jnp.ones((8, 64))
optimizer.update(sparse, nnx.grad(loss)(sparse, x))
sd.evolve(sparse, optimizer, "rigl", share=0.2, loss=loss, batch=(x,))
sd.set_layouts(sd.sparsify(model, density=0.25, block=16, evolving=True), sd.layouts(sparse))
sd.densify(sparse)
sd.erk_densities(model, 0.25, block=16)
sd.sparsify(model, "magnitude", density=0.25, block=16)
sd.prune(model, [jax.random.normal(jax.random.key(0), (256, 64))], density=0.5, block=16)
layout = sd.make_layout("random", 64, 64, 16, 0.25)
sd.evolve_blocks(layout, sd.draw_blocks(jax.random.key(0), layout))
sd.block_sparse_matmul(x, sd.draw_blocks(jax.random.key(0), layout), layout)
print("done")
"""


def run(code):
    return subprocess.run([sys.executable, "-c", BLOCKED + code], capture_output=True, text=True)


def listed(name):
    config = configparser.RawConfigParser()
    config.read(ROOT / "setup.cfg")
    text = config["options"]["install_requires"] if name == "core" else ""
    text = text or config["options.extras_require"][name]
    lines = [line for line in text.splitlines() if line and not line.startswith(("#", "sparse_"))]
    packages = [re.match(r"[\w-]+", line)[0] for line in lines]
    return {MODULES.get(package, package.replace("-", "_")) for package in packages}


def test_the_core_requirements_are_those_of_layers():
    assert listed("core") == {"jax", "flax", "optax", "numpy", "absl", "scipy", "threadpoolctl"}


@pytest.mark.parametrize("extra", extras.MODULES)
def test_the_table_of_modules_is_that_of_setup_cfg(extra):
    # datasets installs huggingface_hub.
    expected = listed(extra) - {"jax", "flax"} | ({"huggingface_hub"} if extra == "data" else set())
    assert set(extras.MODULES[extra]) == expected


@pytest.mark.slow
def test_layers_train_evolve_and_are_pruned_without_the_other_packages():
    done = run(LAYERS)
    assert done.stdout.endswith("done\n"), done.stderr[-2000:]


@pytest.mark.parametrize("name", some(["train", "load", "preset", "Tokenizer"], "train"))
def test_a_name_that_needs_more_says_which_extra_has_it(name):
    done = run(f"sd.{name}")
    words = rf"UserError: sd.{name} needs the package \w+: pip install 'sparse_dataflow\[train\]'."
    assert re.search(words, done.stderr), done.stderr[-500:]


def test_a_command_that_needs_more_says_which_extra_has_it():
    done = run(
        "sys.argv[1:] = ['train', '--describe']\nfrom sparse_dataflow.__main__ import main; main()"
    )
    assert done.returncode == 2
    words = r"error: This command needs the package \w+: pip install 'sparse_dataflow\[train\]'.\n"
    assert re.fullmatch(words, done.stderr), done.stderr[-500:]


def private_imports(path):
    """Returns the imported modules of other packages whose names begin with an underscore."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    foreign = [name for name in names if not name.startswith("sparse_dataflow.")]
    is_private = lambda part: part.startswith("_") and not part.startswith("__")  # noqa: E731
    return [name for name in foreign if any(map(is_private, name.split(".")[1:]))]


TESTED_PRIVATE = {
    # Programs that are read are verified: tests/commands/test_program_cache.py.
    "jax._src.compilation_cache",
    # Saves of several processes: tests/core/checkpoint and tests/experiments, with the newest jax.
    "jax._src.distributed",
    # A peer of `kernel_bench`: tests/experiments/test_optional_packages.py, with the newest torch.
    "torch.sparse._triton_ops.bsr_dense_mm",
}
"""What has no public name; the tests that would notice a change."""


@pytest.mark.parametrize("folder", ["sparse_dataflow", "experiments", "launch", "examples"])
def test_no_private_module_of_another_library_is_imported(folder):
    names = {name for path in (ROOT / folder).rglob("*.py") for name in private_imports(path)}
    assert names <= TESTED_PRIVATE


def test_a_package_of_no_extra_is_installed_by_its_name():
    error = ModuleNotFoundError("No module named 'nothing'", name="nothing.more")
    assert extras.missing(error, "It") == "It needs the package nothing: pip install nothing."
    assert not extras.missing(ImportError("cannot import name"), "It")
    own = ModuleNotFoundError("No module named 'sparse_dataflow.x'", name="sparse_dataflow.x")
    assert not extras.missing(own, "It")
