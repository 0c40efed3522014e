"""`named_tokenizer`: an existing tokenizer for a new model."""

from sparse_dataflow.data import tokenizer_library
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import hub_models, special_tokens, tokenizer_files, tokenizer_json

_FILES = (tokenizer_json.FILE, "config.json", *special_tokens.FILES)


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
    path = folder / tokenizer_json.FILE
    try:
        if path.exists() and "format" in json_files.load(path):  # Of a run folder.
            return Tokenizer.load(path)
        source = tokenizer_json.source(folder)
        if source is None:
            raise UserError(
                f"data.tokenizer={name} has no {tokenizer_json.LEGAL}; legal: bpe, gpt2, none, a "
                "folder that has them, hf:OWNER/NAME."
            )
        config_path = folder / "config.json"
        config = json_files.load(config_path) if config_path.exists() else {}
        if "vocab_size" not in config:
            config = dict(config) | _sizes(source)
    except json_files.MALFORMED as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"The tokenizer {folder} cannot be read: {error}.") from error
    return tokenizer_files.read(folder, config).tokenizer


def _sizes(source):
    """Returns the fields of a config.json that `tokenizer_files.read` needs."""
    files = special_tokens.read_files(source.parent)
    vocab = tokenizer_library.vocabulary(json_files.parse(tokenizer_json.text_of(source, files)))
    names = tokenizer_json.names(source, files)
    generation = special_tokens.fields_of(files, special_tokens.GENERATION, source.parent)
    generation_ends = special_tokens.ids_of(generation.get("eos_token_id"), "eos_token_id")
    texts = (names.get("eos_token"), tokenizer_json.END_OF_TEXT, names.get("sep_token"))
    ends = [*generation_ends, *(vocab[text] for text in texts if text in vocab)]
    size = max(vocab.values()) + 1
    if not ends:  # A tokenizer without an end of text gets one more token.
        return {"vocab_size": size + 1, "eos_token_id": size}
    return {"vocab_size": max(size, 1 + ends[0]), "eos_token_id": ends[0]}
