"""Runs the model of this folder in PyTorch, by products of the stored blocks alone.

    python run_in_torch.py "Once upon a time" 20
    python run_in_torch.py --ids "12 7 9" 20        needs no tokenizers

Needs torch and safetensors.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from sparse_dataflow.interchange.serving.prompts import arguments

ACTIVATIONS = {
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_exact": functional.gelu,
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x) ** 2,
    "silu": functional.silu,
}
FEWEST_COLUMNS = 8  # Of fewer, a gather costs more than a product with zeros.


class Product(nn.Module):
    """A projection: the inputs that each line of blocks reads are gathered, and multiplied."""

    def __init__(self, tensors, spec):
        """Takes tensors by their last names, and the spec of the projection."""
        super().__init__()
        index, step, kernel = None, spec.get("block", 1), tensors.get("kernel")
        if "mask" in tensors:
            columns = spec["block_outputs"] or step
            # The first block is in the highest bit, as np.packbits writes it.
            bits = tensors["mask"][..., None] >> torch.arange(7, -1, -1) & 1
            bits = bits.flatten(1)[:, : len(kernel) // columns]
            index = bits.T.nonzero()[:, 1].view(bits.shape[1], -1)
            if columns < FEWEST_COLUMNS:
                entries = (index[..., None] * step + torch.arange(step)).flatten(1)
                whole = torch.zeros(len(kernel), len(bits) * step)
                entries = entries.repeat_interleave(columns, 0)
                kernel, index = whole.scatter(1, entries, kernel).T.contiguous(), None
            else:
                kernel = kernel.view(len(index), columns, -1).mT
        elif "values" in tensors:
            index, values = tensors["in_index"], tensors["values"]
            values = torch.cat([values, torch.zeros_like(values[:1])])
            kernel = values[tensors["in_slot"]].flatten(1, 2)  # Slot -1, of padding, reads zeros.
        self.step, self.hadamard = step, torch.ones(1, 1)
        while len(self.hadamard) < spec.get("hadamard", 0):
            self.hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), self.hadamard)
        terms = {name: tensors.get(name) for name in ("bias", "a_kernel", "b_kernel", "gate")}
        for name, tensor in {"kernel": kernel, "index": index, **terms}.items():
            self.register_buffer(name, tensor)

    def forward(self, x):
        """Multiplies x [batch, tokens, inputs]."""
        size, rows = len(self.hadamard), x.flatten(0, 1)
        if size > 1:
            rows = (rows.unflatten(1, (-1, size)) @ self.hadamard.to(x) / size**0.5).flatten(1)
        if self.index is not None:
            rows = rows.unflatten(1, (-1, self.step))[:, self.index.flatten()]
            lines = rows.reshape(len(rows), len(self.index), -1).transpose(0, 1)
            y = torch.bmm(lines, self.kernel).transpose(0, 1)
        else:
            y = rows @ self.kernel
        y = y.reshape(*x.shape[:2], -1)
        if self.gate is not None:
            y = y + self.gate * (x @ self.a_kernel @ self.b_kernel)
        return y if self.bias is None else y + self.bias


class Model(nn.Module):
    """The model of a folder; batches have prompts of one length."""

    def __init__(self, folder):
        """Reads the files."""
        super().__init__()
        fields = json.loads(Path(folder, "config.json").read_text())
        self.config = {**fields["model"], **fields["forward"]}
        modules: dict = {}
        self.products = nn.ModuleDict()
        for path in Path(folder).glob("*.safetensors"):
            for name, tensor in load_file(path).items():
                at, leaf = name.replace(".", "/").rsplit("/", 1)
                tensor = tensor.float() if tensor.is_floating_point() else tensor
                modules.setdefault(at, {})[leaf] = tensor
        for at, tensors in modules.items():
            if "kernel" in tensors or "values" in tensors:
                spec = self.config["linears"].get(at.split("/")[-1], {})
                self.products[at] = Product(tensors, spec)
            else:
                for leaf, tensor in tensors.items():
                    self.register_buffer(f"{at}/{leaf}", tensor)

    def forward(self, ids, caches=None):
        """Returns logits [batch, tokens, vocabulary] of ids [batch, tokens].

        `caches`, a dict for each layer, gets keys and values, and has those of the tokens before.
        """
        config, get = self.config, self._buffers.get
        caches = [{} for _ in config["layers"]] if caches is None else caches
        start = caches[0]["k"].shape[1] if caches[0] else 0
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)
        x = get("embed/tokens")[ids] * config["embedding_scale"]
        if config["positions"] == "learned":
            x = x + get("embed/positions")[positions]
        for i, cache in enumerate(caches):
            at = f"blocks/{i}/"
            layer = {**config, **config["layers"][i], "positions": positions, "cache": cache}
            attended = self.add(x, x, layer, at, self.attention, "norm1", "norm1_out")
            read = attended if config["residual"] == "sequential" else x
            name = "norm1" if config["residual"] == "parallel_shared_norm" else "norm2"
            x = self.add(attended, read, layer, at, self.mlp, name, "norm2_out")
        x = self.norm(x, "head/norm") * config["logit_scale"]
        y = x @ get("head/output", get("embed/tokens")).T + get("head/output_bias", 0)
        return capped(y, config["logit_cap"])

    def add(self, x, read, layer, at, half, before, after):
        """Adds what attention or the MLP makes of `read` to the residual stream."""
        y = half(layer, at, self.norm(read, at + before) if layer["pre_norms"] else read)
        y = self.norm(y, at + after) if layer["post_norms"] else y
        return x + y * layer["residual_scale"]

    def norm(self, x, at):
        """LayerNorm or RMSNorm over the last axis."""
        x = x - x.mean(-1, keepdim=True) if self.config["norm"] == "layernorm" else x
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["norm_epsilon"])
        return x * self._buffers[f"{at}/scale"] + self._buffers.get(f"{at}/bias", 0)

    def mlp(self, layer, at, x):
        """mlp_out of the activation of mlp_in, or of mlp_in times that of mlp_gate."""
        hidden, function = self.products[at + "mlp_in"](x), ACTIVATIONS[layer["activation"]]
        gated = layer["gated_mlp"]
        hidden = hidden * function(self.products[at + "mlp_gate"](x)) if gated else function(hidden)
        return self.products[at + "mlp_out"](hidden)

    def attention(self, layer, at, x):
        """Causal attention, over the last tokens of a window if there is one."""
        queries, groups = layer["num_heads"], layer["num_kv_heads"] or layer["num_heads"]
        if layer["fused_qkv"]:
            # Columns are by group: the queries that share a key, then this key, then its value.
            grid = self.products[at + "qkv"](x).unflatten(2, (groups, queries // groups + 2, -1))
            q, k, v = grid[:, :, :, :-2].flatten(2, 3), grid[:, :, :, -2], grid[:, :, :, -1]
        else:
            sizes = {"q": queries, "k": groups, "v": groups}
            q, k, v = (self.products[at + n](x).unflatten(2, (h, -1)) for n, h in sizes.items())
        if layer["qk_norm"]:
            name = "{}_norm" if layer["qk_norm_scope"] == "head" else "{}_norms"
            whole = 2 if layer["qk_norm_scope"] == "all_heads" else 3
            q, k = (
                self.norm(array.flatten(whole), at + name.format(n)).view_as(array)
                for n, array in (("q", q), ("k", k))
            )
        q, k = rotated(layer, q), rotated(layer, k)
        if layer["cache"]:
            k, v = (torch.cat([layer["cache"][n], a], 1) for n, a in (("k", k), ("v", v)))
        layer["cache"].update(k=k, v=v)
        k, v = (array.repeat_interleave(queries // groups, 2) for array in (k, v))
        scores = torch.einsum("bqhw,bkhw->bhqk", q, k) * (layer["query_scale"] / q.shape[3] ** 0.5)
        distance = layer["positions"][:, None] - torch.arange(k.shape[1], device=x.device)
        seen = (distance >= 0) & (distance < (layer["window"] or k.shape[1]))
        scores = capped(scores, layer["attention_cap"]).masked_fill(~seen, -torch.inf)
        attended = torch.einsum("bhqk,bkhw->bqhw", scores.softmax(-1), v)
        return self.products[at + "attn_out"](attended.flatten(2))

    @torch.no_grad()
    def generate(self, ids, count):
        """Returns the `count` most likely ids [batch, count] after ids [batch, tokens]."""
        written = [ids]
        caches: list[dict] = [{} for _ in self.config["layers"]]
        for _ in range(count):
            written.append(self(written[-1], caches)[:, -1:].argmax(-1))
        return torch.cat(written[1:], 1)


def capped(x, cap):
    """Values whose magnitude stays below a cap, if it is not 0."""
    return cap * torch.tanh(x / cap) if cap else x


def rotated(layer, x):
    """Rotates the first features of x [batch, tokens, heads, width], their halves paired."""
    frequencies = torch.tensor(layer["frequencies"], device=x.device)
    angle = (layer["positions"][:, None] * frequencies)[:, None]
    sin, cos = (f(angle) * layer["rotation_scale"] for f in (torch.sin, torch.cos))
    first, second, rest = x.tensor_split([len(frequencies), 2 * len(frequencies)], dim=3)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], 3)


def main():
    """Prints the continuation of a text, or of token ids."""
    folder = Path(__file__).parent
    fields = json.loads((folder / "config.json").read_text())
    given, text = arguments(folder, fields, fields["context"])
    ids = Model(folder).generate(torch.tensor([given.tokens]), given.count)[0].tolist()
    print(*ids) if text is None else print(given.prompt + text.added(given.tokens, ids))


if __name__ == "__main__":
    main()
