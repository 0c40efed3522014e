"""A kind of weight as somebody else adds it, and trains it on devices that are cut by tensor."""

import dataclasses
import json
import sys
from typing import Any

import jax.numpy as jnp

import sparse_dataflow as sd
from sparse_dataflow.core.weights.block_sparse import BlockSparse
from sparse_dataflow.core.weights.kind import LEAF, VECTOR, Leaf, register

PER_BLOCK = Leaf(VECTOR, columns=(("tensor", "fsdp"),), rows=(("tensor", "fsdp"),), output_dim=0)


@register
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ScaledBlocks(BlockSparse):
    """Stored blocks, each times a trained number."""

    kind = "scaled_blocks"
    words = "scaled blocks"
    offers = frozenset({"tensor_axis", "budget"})

    scale: Any = dataclasses.field(kw_only=True, metadata={LEAF: PER_BLOCK})

    def _blocks(self):
        scale = self.scale[..., None, None].astype(self.values.dtype)
        return BlockSparse(self.values * scale, self.layout, self.precision)

    def __rmatmul__(self, x):
        return x @ self._blocks()

    def dense(self):
        return self._blocks().dense()

    @classmethod
    def shapes(cls, spec, sides):
        shapes = super().shapes(spec, sides)
        return {**shapes, "scale": shapes["values"][:1]}

    @classmethod
    def draw(cls, spec, sides, gain, normal, layout=None):
        arrays = super().draw(spec, sides, gain, normal, layout)
        return {**arrays, "scale": jnp.ones(layout.nnz)}


def losses(mesh, out):
    """Returns the losses of three steps, and that of the saved model."""
    config = sd.preset("pico").change(
        sparsity__kind="scaled_blocks", sparsity__block=8, sparsity__density=0.25,
        model__num_layers=1, model__d_model=32, model__num_heads=2, model__d_ff=64,
        training__steps=3, training__batch=8, training__sequence=16,
        parallel__mesh=mesh, run__twin="no", run__out=out,
    )  # fmt: skip
    texts = [f"Document {number} has a few words. " * 9 for number in range(40)]
    steps = []
    run = sd.train(config, texts=texts, metrics={"seen": lambda step: steps.append(step) or 0.0})
    model = run.model()
    assert model.model.linear("qkv").kind == "scaled_blocks"
    tokens = jnp.arange(16)[None] % 50
    return [float(step.numbers["loss"]) for step in steps], float(sd.loss(sd.load(out), tokens))


if __name__ == "__main__":
    meshes = ("data:8", "data:4,tensor:2")
    print(json.dumps([losses(mesh, f"{sys.argv[1]}/{mesh[-1]}") for mesh in meshes]))
