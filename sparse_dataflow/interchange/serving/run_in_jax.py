"""Runs the programs of this folder with jax alone.

python run_in_jax.py "Once upon a time" 20
python run_in_jax.py --ids "12 7 9" 20        needs no tokenizers
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from sparse_dataflow.interchange.serving.prompts import arguments

DTYPES = {"F32": jnp.float32, "BF16": jnp.bfloat16, "I32": jnp.int32}


class Model:
    """The programs of a folder, and their weights."""

    def __init__(self, folder):
        """Reads the files."""
        self.config = json.loads(Path(folder, "config.json").read_text())
        programs = (Path(folder, name).read_bytes() for name in ("prefill.bin", "decode.bin"))
        prefill, decode = (export.deserialize(bytearray(program)).call for program in programs)
        self.prefill, self.decode = jax.jit(prefill), jax.jit(decode, donate_argnums=1)
        arrays = {}
        for path in Path(folder).glob("*.safetensors"):
            data = np.memmap(path, mode="r")
            start = 8 + int.from_bytes(data[:8].tobytes(), "little")
            for name, entry in json.loads(data[8:start].tobytes()).items():
                if name != "__metadata__":
                    first, end = (start + offset for offset in entry["data_offsets"])
                    array = data[first:end].view(np.dtype(DTYPES[entry["dtype"]]))
                    arrays[name] = jnp.array(array.reshape(entry["shape"]))
        self.arrays = [arrays[name] for name in self.config["arrays"]]

    def generate(self, prompts, count, temperature=0.0, seed=0):
        """Continues lists of token ids: int32 [prompts, count]; temperature 0 is greedy."""
        lengths, most = np.array([len(ids) for ids in prompts], np.int32), self.config["most"]
        longest = int(max(lengths))
        if len(prompts) > most["prompts"] or longest + count > most["tokens"]:
            raise ValueError(f"{len(prompts)} prompts, {longest} + {count} tokens; legal: {most}.")
        # Powers of two, so that few shapes are compiled.
        width, room = (
            min(1 << (n - 1).bit_length(), most["tokens"]) for n in (longest, longest + count)
        )
        tokens = np.array([[*ids, *[0] * (width - len(ids))] for ids in prompts], np.int32)
        logits, caches = self.prefill(self.arrays, tokens, lengths)
        caches = [jnp.pad(cache, [(0, 0), (0, 0), (0, room - width), (0, 0)]) for cache in caches]
        key, written = jax.random.key(seed), []
        for step in range(count):
            if temperature:
                logits += temperature * jax.random.gumbel(
                    jax.random.fold_in(key, step), logits.shape
                )
            written.append(jnp.argmax(logits, axis=-1).astype(jnp.int32))
            at = lengths + np.int32(step)
            logits, caches = self.decode(self.arrays, caches, written[-1], at)
        return np.stack(written, axis=1)


def main():
    """Prints the continuation of a text, or of token ids."""
    model = Model(Path(__file__).parent)
    given, text = arguments(Path(__file__).parent, model.config, model.config["most"]["tokens"])
    ids = model.generate([given.tokens], given.count)[0].tolist()
    print(*ids) if text is None else print(given.prompt + text.added(given.tokens, ids))


if __name__ == "__main__":
    main()
