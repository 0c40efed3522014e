"""GGUF, the files of llama.cpp: read as Hugging Face directories, and written."""
