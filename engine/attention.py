"""The attention function that transformers' models call: ragged queries on a paged KV cache.

transformers hands over one flat row of queries, keys and values after rotary embedding, and passes our metadata through
as a keyword. New keys and values go to their slots; then requests of like size are padded together, so that no layer
loops over requests, and each group attends at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .input_batch import InputBatch

Array = np.ndarray[Any, Any]

SHORT_QUERY = 8
"""Queries up to this many rows (a decode, a verification) are padded to one another: one more group costs every layer
more than the few rows do."""
SINGLES_WORTH = 16
"""but so many that decode without drafts are a group of their own: beside drafts they would be padded."""
SPLIT_WORTH = 64
"""KV blocks of padding that a further group must save: about what its own calls cost on a CPU."""

NAME = "specrun"
"""As registered with transformers."""


@dataclass(slots=True)
class AttentionGroup:
    """n entries padded to Q queries and L keys."""

    query_rows: Tensor
    """[n, Q] row of each query in the flat batch, 0 where padded."""
    picked: Tensor | None
    """Index of each query that is not padding, of the n * Q; None when none is."""
    query_positions: Tensor
    """[n, Q] position of each query, 0 where padded."""
    blocks: Tensor
    """[n * B] KV blocks, entry after entry."""
    num_keys: int
    """L = B * block_size."""
    is_whole: bool
    """Whether these are all rows of the batch, in order and without padding."""
    _masks: dict[tuple[int | None, int | None, int], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, chunk: int | None, dtype: torch.dtype, repeats: int) -> Tensor:
        """[n, 1, repeats * Q, L] additive: 0 where a query may look, -inf elsewhere; its Q rows again and again. Built
        once a step for each kind of layer."""
        if (window, chunk, repeats) not in self._masks:
            query = self.query_positions[:, None, :, None]
            key = torch.arange(self.num_keys, device=query.device)
            hidden = key > query
            if window:
                hidden |= query - key >= window
            if chunk:
                hidden |= torch.div(query, chunk, rounding_mode="floor") != key // chunk
            mask = torch.zeros(hidden.shape, dtype=dtype, device=query.device)
            mask.masked_fill_(hidden, float("-inf"))
            self._masks[window, chunk, repeats] = mask.repeat(1, 1, repeats, 1) if repeats > 1 else mask
        return self._masks[window, chunk, repeats]


@dataclass(slots=True)
class AttentionMetadata:
    """What every layer needs to know of a step."""

    slot_mapping: Tensor
    """[T]"""
    groups: list[AttentionGroup]
    keys: list[Tensor]
    values: list[Tensor]
    """For each layer [num_blocks, block_size, num_kv_heads, head_dim]."""
    chunk_sizes: list[int | None]
    """For each layer the chunk of chunked attention (Llama 4); None elsewhere."""


@dataclass(slots=True)
class KVShapes:
    """Stands in for the metadata once, at load, to learn (num_kv_heads, key dim, value dim) of each layer."""

    layers: dict[int, tuple[int, int, int]] = field(default_factory=dict)


def build_groups(inputs: InputBatch, block_size: int, device: torch.device, by_row: bool) -> list[AttentionGroup]:
    """Split a batch into groups of like size.

    by_row makes every row an entry of its own, padded to the blocks that its position fills: then what a row computes
    depends on the row alone (deterministic mode).
    """
    requests = np.arange(len(inputs.query_lens))
    first: Array = inputs.cu_seqlens[:-1]
    lens: Array = inputs.query_lens
    ends: Array = inputs.seq_lens
    if by_row:
        requests = np.repeat(requests, inputs.query_lens)
        first, ends = np.arange(len(requests)), inputs.positions + 1
        lens = np.ones_like(first)
    num_blocks = -(-ends // block_size)
    groups = []
    for member in _alike(num_blocks, worth=0) if by_row else _partition(lens, num_blocks):
        tables = inputs.block_tables[requests[member]]
        rows = len(inputs.positions)
        groups.append(_pad_group(first[member], lens[member], ends[member], tables, rows, block_size, device))
    return groups


def _partition(lens: Array, num_blocks: Array) -> list[Array]:
    """Members of each group: those that decode, those that verify, prefill chunks by their magnitude."""
    is_single = lens == 1
    short = 0 if is_single.sum() < SINGLES_WORTH else np.where(is_single, 0, 1)
    magnitude = np.where(lens <= SHORT_QUERY, short, np.ceil(np.log2(lens)).astype(np.int64))
    parts = [np.flatnonzero(magnitude == each) for each in np.unique(magnitude)]
    return [part[group] for part in parts for group in _alike(num_blocks[part], SPLIT_WORTH)]


def _alike(num_blocks: Array, worth: int) -> list[Array]:
    """Cut where the longest is twice as long (with worth 0: longer at all) and the cut saves more than `worth` blocks.

    Members keep their order within a group, so that a whole batch in one group needs no gathering of its rows.
    """
    order = np.argsort(-num_blocks, kind="stable")
    ranked = num_blocks[order]
    groups, start = [], 0
    while start < len(ranked):
        longest = ranked[start]
        saved = longest * np.arange(len(ranked) - start, 0, -1) - np.cumsum(ranked[start:][::-1])[::-1]
        shorter = ranked[start:] < longest if worth == 0 else 2 * ranked[start:] <= longest
        cuts = np.flatnonzero(shorter & (saved > worth))
        stop = start + int(cuts[0]) if len(cuts) else len(ranked)
        groups.append(np.sort(order[start:stop]))
        start = stop
    return groups


def _pad_group(
    first: Array,
    lens: Array,
    ends: Array,
    tables: Array,
    num_rows: int,
    block_size: int,
    device: torch.device,
) -> AttentionGroup:
    """Rows first .. first + lens of each member, the last at position ends - 1, and its KV blocks."""
    num_blocks = -(-int(ends.max()) // block_size)
    offsets = np.arange(int(lens.max()))
    is_query = offsets < lens[:, None]
    rows = np.where(is_query, first[:, None] + offsets, 0)
    positions = np.where(is_query, (ends - lens)[:, None] + offsets, 0)
    blocks = np.ascontiguousarray(tables[:, :num_blocks]).ravel()

    def tensor(array: Array) -> Tensor:
        return torch.from_numpy(array).to(device)

    return AttentionGroup(
        query_rows=tensor(rows.astype(np.int64)),
        picked=None if is_query.all() else tensor(np.flatnonzero(is_query)),
        query_positions=tensor(positions.astype(np.int64)),
        blocks=tensor(blocks.astype(np.int64)),
        num_keys=num_blocks * block_size,
        is_whole=rows.size == num_rows and bool((rows.ravel() == np.arange(num_rows)).all()),
    )


def attend(
    module: torch.nn.Module,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,  # [1, Hkv, T, Dv]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    specrun: AttentionMetadata | KVShapes | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Write the new KV, attend, and return [1, T, Hq, Dv] as transformers expects."""
    if specrun is None:
        raise RuntimeError("this model does not pass keywords on to its attention layers")
    layer: int = module.layer_idx  # type: ignore[assignment]
    if isinstance(specrun, KVShapes):
        specrun.layers[layer] = (key.shape[1], key.shape[-1], value.shape[-1])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
    keys, values = specrun.keys[layer], specrun.values[layer]
    keys.flatten(0, 1).index_copy_(0, specrun.slot_mapping, key[0].transpose(0, 1))
    values.flatten(0, 1).index_copy_(0, specrun.slot_mapping, value[0].transpose(0, 1))
    rows = query[0].transpose(0, 1)  # [T, Hq, D]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = rows.new_empty(rows.shape[0], query.shape[1], value.shape[-1])
    num_sharing = query.shape[1] // key.shape[1]
    for group in specrun.groups:
        attended = _attend_group(
            _pick(rows, group).transpose(1, 2),
            _gather(keys, group),
            _gather(values, group),
            group.mask(sliding_window, specrun.chunk_sizes[layer], query.dtype, num_sharing),
            scale,
            softcap,
            s_aux,
        ).transpose(1, 2)  # [n, Q, Hq, Dv]
        if group.is_whole:
            return attended.flatten(0, 1)[None], None
        attended = attended.flatten(0, 1)
        if group.picked is None:
            out.index_copy_(0, group.query_rows.flatten(), attended)
        else:
            out.index_copy_(0, group.query_rows.flatten()[group.picked], attended[group.picked])
    return out[None], None


def _pick(rows: Tensor, group: AttentionGroup) -> Tensor:
    """[n, Q, Hq, D] queries of a group."""
    return rows.view(*group.query_rows.shape, *rows.shape[1:]) if group.is_whole else rows[group.query_rows]


def _gather(cache: Tensor, group: AttentionGroup) -> Tensor:
    """[n, Hkv, L, D] keys or values of a group."""
    picked = cache.flatten(1).index_select(0, group.blocks)
    return picked.view(group.query_rows.shape[0], group.num_keys, *cache.shape[2:]).transpose(1, 2)


def _attend_group(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """[n, Hq, Q, Dv]. The g query heads that share a KV head attend as g Q queries of one head: a third or an eighth as
    many small products, in which a few more queries cost little. Fused where torch has it; spelled out for soft-capped
    scores and attention sinks."""
    n, num_heads, num_queries, _ = query.shape
    packed = query.reshape(n, key.shape[1], -1, query.shape[-1])  # [n, Hkv, g Q, D]
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)
        return out.reshape(n, num_heads, num_queries, -1)
    scores = (packed @ key.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, key.shape[1], -1, 1).repeat_interleave(num_queries, dim=2)
        scores = torch.cat([scores, sink.expand(n, -1, -1, -1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
    return (weights @ value).reshape(n, num_heads, num_queries, -1)
