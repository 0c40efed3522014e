"""What is learned."""

import dataclasses

from sparse_dataflow.core.config.settings import MOST_SIZE, Readable, between, setting, validate
from sparse_dataflow.files.errors import UserError

TOKENIZERS = ("bpe", "gpt2", "none")
"""Tokenizers that are no directory and no name on the hub."""
LOSSES = ("all", "answers")


@dataclasses.dataclass(frozen=True, repr=False)
class DataConfig(Readable):
    """The corpus and its tokenizer.

    Attributes:
      tokenizer: "bpe" learns `model.vocab_size` tokens from the corpus. "none" takes
        `model.vocab_size` for the ids of a corpus of token ids.
      loss: the tokens that count in training and in held-out losses; see `data.examples`.
    """

    corpus: str = setting(
        "python_stdlib",
        "python_stdlib, sotu, a folder, file or address of text, a saved Hugging Face dataset, "
        "hf:OWNER/NAME, a tfds name such as c4/en, or a mixture such as books:0.7,code:0.3.",
        path=True,
        address=True,
    )
    column: str = setting(
        "",
        "Field or column with the text; empty is text, else the only one of strings.",
    )
    validation: str = setting(
        "",
        "A corpus that is held out instead of some of the documents of data.corpus.",
        path=True,
    )
    tokenizer: str = setting(
        "bpe",
        "bpe is trained on the corpus; gpt2 is GPT-2's own; DIR or hf:NAME is that of a Hugging "
        "Face directory or run folder; none is for corpora of token ids.",
        path=True,
    )
    extend_vocabulary: int = setting(
        0,
        "Tokens to add to the tokenizer of run.init_from, learned from data.corpus, of a mixture "
        "from its first corpus. Their rows begin as the mean of the tokens that they join.",
        legal=between(0, MOST_SIZE),
    )
    loss: str = setting(
        "all",
        'Tokens that the loss counts; answers: those of a .jsonl corpus of "prompt" and "answer", '
        'or "messages", which the chat template of run.init_from renders.',
        choices=LOSSES,
    )

    def __post_init__(self):
        validate(self, "data")
        if not self.corpus:
            raise UserError(
                "data.corpus is empty; legal: python_stdlib, sotu, a folder or file, a name or "
                "a mixture."
            )
        if not self.tokenizer:
            raise UserError(
                f"data.tokenizer is empty; legal: {', '.join(TOKENIZERS)}, DIR, hf:NAME."
            )
