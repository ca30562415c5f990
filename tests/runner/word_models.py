"""Tiny checkpoints whose tokens are words."""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def save_word_model(folder: Path, words: Sequence[str], eos_token_id: int | None = None, size: int = 2) -> Path:
    """A llama that soon repeats itself, as random models do, so that n-gram drafts are found and accepted.

    Token 0 is <unk>, the next are the words. size: layers, and half the heads.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16 * size,
        intermediate_size=24 * size,
        num_hidden_layers=size,
        num_attention_heads=2 * size,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    vocab = {word: token for token, word in enumerate(["<unk>", *words])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return folder
