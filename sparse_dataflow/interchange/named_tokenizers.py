"""`named_tokenizer`: an existing tokenizer for a new model."""

from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import hub_models, special_tokens, tokenizer_files

_FILES = (tokenizer_files.FILE, "config.json", *special_tokens.FILES)


def named_tokenizer(name: str) -> Tokenizer:
    """Returns the tokenizer of a Hugging Face directory, a run folder or a model on the hub.

    Its vocabulary has the size that config.json gives, if there is one, else that of its tokens and
    an end of text.

    Args:
      name: a folder, or a model on the hub, of which only the files of the tokenizer are fetched.

    Raises:
      UserError: it is missing, damaged, has links that lead out of it, or is of another kind than
        `tokenizer_files` reads.
    """
    folder = hub_models.local_folder(name, _FILES)
    path = folder / tokenizer_files.FILE
    try:
        if path.exists() and "format" in json_files.load(path):  # Of a run folder.
            return Tokenizer.load(path)
        vocab = tokenizer_files.vocabulary(folder)
        if vocab is None:
            raise UserError(
                f"data.tokenizer={name} has no {tokenizer_files.LEGAL}; legal: bpe, gpt2, none, a "
                "folder that has them, hf:OWNER/NAME."
            )
        config_path = folder / "config.json"
        config = json_files.load(config_path) if config_path.exists() else {}
        if "vocab_size" not in config:
            config = dict(config) | _sizes(folder, vocab)
    except json_files.MALFORMED as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"The tokenizer {folder} cannot be read: {error}.") from error
    return tokenizer_files.read(folder, config).tokenizer


def _sizes(folder, vocab):
    """Returns the fields of a config.json that `tokenizer_files.read` needs."""
    settings, path = {}, folder / special_tokens.SETTINGS
    if path.exists():
        settings = json_files.load(path)
    end = settings.get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    number = vocab.get(end, vocab.get(tokenizer_files.END_OF_TEXT))
    size = max(vocab.values()) + 1
    if number is None:  # A tokenizer without an end of text gets one more token.
        return {"vocab_size": size + 1, "eos_token_id": size}
    return {"vocab_size": size, "eos_token_id": number}
