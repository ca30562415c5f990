"""Text to token ids and back: a checkpoint's own tokenizer and chat template, in batches."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from ..engine.checkpoint import Checkpoint
from ..engine.errors import ModelError

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextTokenizer(Protocol):
    """What a job needs of a tokenizer. Called from two threads: one encodes while another decodes."""

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint brought a chat template."""
        ...

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text; raises on text that is not valid Unicode."""
        ...

    def decode_batch(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Text of each row of ids, special tokens left out; torn characters become U+FFFD."""
        ...

    def render(
        self, messages: Sequence[dict[str, Any]], chat_template: str | None, continue_final_message: bool = False
    ) -> str:
        """The prompt text of a conversation, ready for the assistant's turn or for the rest of its last message.

        Raises what the template raises.
        """
        ...

    def token_bytes(self) -> list[bytes]:
        """Token id -> the bytes that it adds to the text; b"" for special tokens."""
        ...


class Tokenizer:
    """A transformers tokenizer, called past its slow outer layers where it is a fast one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._token_bytes: list[bytes] | None = None
        self._backend: Any = tokenizer.backend_tokenizer if getattr(tokenizer, "is_fast", False) else None
        if self._backend is not None:
            # A change of these while another thread decodes raises "Already borrowed", so it happens here, once.
            self._backend.no_truncation()
            self._backend.no_padding()

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, trust_remote_code: bool = False) -> Tokenizer:
        """Load the tokenizer that came with the weights; ModelError when there is none that loads."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                checkpoint.folder, trust_remote_code=trust_remote_code, **checkpoint.from_pretrained_kwargs()
            )
        except Exception as exc:  # transformers raises OSError, ValueError, KeyError, ImportError and more here
            reason = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
            raise ModelError(f"model.path {checkpoint.name!r}: its tokenizer does not load: {reason}") from exc
        return cls(tokenizer)

    @property
    def bos_token(self) -> str | None:
        """The beginning-of-sequence token's text."""
        bos: str | None = self._tokenizer.bos_token
        return bos

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token."""
        eos: int | None = self._tokenizer.eos_token_id
        return eos

    @property
    def unk_token_id(self) -> int | None:
        """The token for what no other stands for; None in vocabularies that spell out bytes."""
        unk: int | None = self._tokenizer.unk_token_id
        return unk

    @property
    def special_token_ids(self) -> dict[str, int]:
        """Name -> id of each special token, such as the ends of turns."""
        added = self._tokenizer.added_tokens_decoder.items()
        return {token.content: token_id for token_id, token in added if token.special}

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint brought a chat template."""
        return bool(self._tokenizer.chat_template)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text. A text that already begins with the BOS token gets no second one."""
        bos = self.bos_token
        if not add_special_tokens or not bos or not any(text.startswith(bos) for text in texts):
            return self._encode(texts, add_special_tokens)
        rows: list[list[int]] = [[] for _ in texts]
        for begins in (True, False):
            where = [i for i, text in enumerate(texts) if text.startswith(bos) == begins]
            for i, ids in zip(where, self._encode([texts[i] for i in where], not begins), strict=True):
                rows[i] = ids
        return rows

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        if not texts:
            return []
        if self._backend is not None:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
            return [encoding.ids for encoding in encodings]
        rows: list[list[int]] = self._tokenizer(
            list(texts), add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False
        )["input_ids"]
        return rows

    def decode_batch(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Text of each row of ids, special tokens left out; torn characters become U+FFFD."""
        if not rows:
            return []
        texts: list[str]
        if self._backend is not None:
            texts = self._backend.decode_batch(rows, skip_special_tokens=True)
        else:
            texts = self._tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return texts

    def render(
        self, messages: Sequence[dict[str, Any]], chat_template: str | None, continue_final_message: bool = False
    ) -> str:
        """See TextTokenizer; chat_template (jinja) replaces the checkpoint's own."""
        text: str = self._tokenizer.apply_chat_template(
            list(messages),
            chat_template=chat_template,
            tokenize=False,
            add_generation_prompt=not continue_final_message,
            continue_final_message=continue_final_message,
        )
        return text

    def token_bytes(self) -> list[bytes]:
        """Token id -> the bytes that it adds to the text, as long as the largest id asks for; made once."""
        if self._token_bytes is None:
            self._token_bytes = self._make_token_bytes()
        return self._token_bytes

    def _make_token_bytes(self) -> list[bytes]:
        vocab: dict[str, int] = self._tokenizer.get_vocab()
        pieces = [b""] * (max(vocab.values(), default=-1) + 1)
        convert = self._piece_converter()
        for piece, token in vocab.items():
            pieces[token] = convert(piece)
        for token, added in self._tokenizer.added_tokens_decoder.items():
            if token < len(pieces):
                pieces[token] = b"" if added.special else added.content.encode()
        return pieces

    def _piece_converter(self) -> Any:
        decoder = json.loads(self._backend.to_str())["decoder"] if self._backend is not None else None
        return _byte_level_piece if "ByteLevel" in json.dumps(decoder) else _sentencepiece_piece


def _sentencepiece_piece(piece: str) -> bytes:
    """Bytes of a piece that marks spaces with U+2581 and spells unknown bytes <0xNN>."""
    match = BYTE_PIECE.fullmatch(piece)
    return bytes([int(match.group(1), 16)]) if match else piece.replace("\u2581", " ").encode()


def _byte_level_piece(piece: str) -> bytes:
    """Bytes of a piece in which each byte is one printable character; others are literal text."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in piece])
    except KeyError:
        return piece.encode()


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's byte-level BPE: printable Latin-1 as it is, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_OF_CHAR = _byte_alphabet()
