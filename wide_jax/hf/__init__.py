"""Hugging Face in and out: configs, weights, tokenizers, GGUF, and the WIDE model folder."""
