"""Builds empty stand-ins of ROCm's libraries, so that jax's plugin for AMD GPUs loads and compiles.

    python tests/compile/rocm_stand_ins.py FOLDER

The plugin has the compiler, its linker and AMD's device libraries inside.  It also needs the
libraries that run programs, which no wheel has: every function of a stand-in fails.
"""

import collections
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

SYSTEM = re.compile(r"(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|ld-linux.*)\.so")


def plugin() -> Path | None:
    """Returns the plugin's library, or None where it is not installed."""
    spec = importlib.util.find_spec("jax_plugins")
    folders = map(Path, spec.submodule_search_locations or ()) if spec else ()
    return next((path for each in folders for path in each.glob("*/xla_rocm_plugin.so")), None)


def build(library: Path, folder: Path) -> None:
    """Builds into a folder each library that another one needs."""
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", _run("readelf", "-dW", library))
    owner = {}  # Version of symbols -> the library that has it.
    file = ""
    for line in _run("readelf", "-VW", library).splitlines():
        if found := re.search(r"File: (\S+)", line):
            file = found[1]
        elif file and (found := re.search(r"Name: (\S+)  Flags", line)):
            owner[found[1]] = file
    symbols: dict[str, dict] = collections.defaultdict(lambda: collections.defaultdict(list))
    ours = [name for name in needed if not SYSTEM.match(name)]
    for line in _run("nm", "-D", "--undefined-only", library).splitlines():
        kind, symbol = line.split()[-2:]
        name, _, version = symbol.partition("@")
        home = owner.get(version.lstrip("@"), ours[0])
        if kind == "U" and home in ours:
            symbols[home][version.lstrip("@")].append(name)
    for name in ours:
        source, versions = folder / "stand_in.c", folder / "stand_in.map"
        functions = [each for group in symbols[name].values() for each in group]
        source.write_text("".join(f"long {each}(void) {{ return 100; }}\n" for each in functions))
        named = {version: group for version, group in symbols[name].items() if version}
        for version in (version for version, file in owner.items() if file == name):
            named.setdefault(version, [])
        texts = (f"{v} {{ {''.join(f'{s};' for s in group)} }};\n" for v, group in named.items())
        versions.write_text("".join(text.replace("{ ", "{ global: ", 1) for text in texts))
        options = [f"-Wl,-soname,{name}", *([f"-Wl,--version-script={versions}"] if named else [])]
        _run("cc", "-w", "-shared", "-fPIC", *options, "-o", folder / name, source)


def _run(*command):
    done = subprocess.run([*map(str, command)], check=True, capture_output=True, text=True)
    return done.stdout


if __name__ == "__main__":
    library = plugin()
    if library is None:
        raise SystemExit("The plugin is not installed: pip install 'jax[rocm7-local]'.")
    build(library, Path(sys.argv[1]))
