"""A GGUF file's header, parsed once a process.

transformers parses it anew for the configuration, the tokenizer and the weights, and rebuilds the table of tensor names
for every module: seconds each time for a vocabulary of 50,000. Importable without torch.
"""

from __future__ import annotations

from functools import cache


def parse_once() -> None:
    """Let transformers' readers, which look these up in the gguf package at each call, share one result."""
    import gguf

    if not hasattr(gguf.GGUFReader, "cache_clear"):
        gguf.GGUFReader = cache(gguf.GGUFReader)
        gguf.get_tensor_name_map = cache(gguf.get_tensor_name_map)


def forget() -> None:
    """Free the parsed headers; a vocabulary takes hundreds of megabytes in this form."""
    import gguf

    if hasattr(gguf.GGUFReader, "cache_clear"):
        gguf.GGUFReader.cache_clear()
