"""Block-sparse weights that pay while a language model trains."""
