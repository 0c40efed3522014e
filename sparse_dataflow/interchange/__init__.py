"""Import and export of weights, tokenizers and model cards in Hugging Face formats."""
