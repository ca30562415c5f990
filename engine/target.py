"""The target model: a Hugging Face causal LM run over a ragged batch on a paged KV cache.

transformers' modeling code supplies everything but attention. What it cannot run that way is refused at load: first by
the kinds of layer it declares, then by comparing a ragged run of two sequences with plain forward passes.
"""

from __future__ import annotations

import logging
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import AttentionInterface
from transformers.utils import logging as hf_logging

from . import gguf_header
from .attention import NAME, AttentionMetadata, KVShapes, attend, build_groups
from .checkpoint import Checkpoint, max_model_len
from .config import EngineConfig
from .errors import ModelError
from .input_batch import InputBatch
from .linear import swap_linears
from .norm import swap_norms

LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}
"""Self-check: largest root-mean-square error against plain forward, as a share of the logits' own. A wrong mask or
position gives more than 0.5; the two kinds of rounding differ by far less. float64 keeps room for the float32 norms and
softmax inside transformers' own code."""

AttentionInterface.register(NAME, attend)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Heads and sizes of each layer's keys and values: (num_kv_heads, key dim, value dim)."""

    layers: dict[int, tuple[int, int, int]]
    dtype: torch.dtype

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block over all layers."""
        per_token = sum(heads * (key + value) for heads, key, value in self.layers.values())
        return per_token * block_size * self.dtype.itemsize


class Target:
    """A causal LM with our attention. `allocate` gives it KV blocks, `forward` runs a ragged batch."""

    def __init__(self, model: Any, config: EngineConfig) -> None:
        """Takes a transformers model in evaluation mode, on its device. Raises ModelError if it cannot run exactly."""
        self.model = model
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.block_size = config.block_size
        self.deterministic = config.deterministic
        self.text_config = model.config.get_text_config()
        _refuse_unsupported(model, config)
        self.max_model_len = max_model_len(self.text_config, config.max_model_len)
        self.vocab_size: int = self.text_config.vocab_size
        self.eos_token_ids = _eos_token_ids(model)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        plain = self._plain_logits()
        model.set_attn_implementation(NAME)
        self.kv_layout = self._probe_kv_layout()
        self._chunk_sizes = _chunk_sizes(self.text_config, max(self.kv_layout.layers) + 1)
        if self.device.type == "cpu":
            swap_linears(model, config.deterministic)
        swap_norms(model)
        self._self_check(plain)

    @classmethod
    def load(cls, checkpoint: Checkpoint, config: EngineConfig) -> Target:
        """Read the weights and build the model. Raises ModelError."""
        device = _device(config.device)
        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()
        try:
            # The GGUF reader draws a progress bar of its own that no switch turns off.
            with redirect_stderr(StringIO()):
                model, info = AutoModelForCausalLM.from_pretrained(
                    checkpoint.folder,
                    dtype=_dtype(checkpoint, config),
                    trust_remote_code=config.trust_remote_code,
                    output_loading_info=True,
                    **_format_kwargs(checkpoint),
                )
        except (OSError, ValueError, KeyError, ImportError, SafetensorError) as exc:
            raise ModelError(f"cannot load the model {checkpoint.name!r}: {str(exc).strip().splitlines()[0]}") from exc
        gguf_header.forget()
        # transformers fills what a checkpoint lacks with random numbers and only logs it.
        for made_up in sorted(info["missing_keys"]) + sorted(map(str, info["mismatched_keys"])):
            raise ModelError(
                f"the model {checkpoint.name!r} lacks usable weights for {made_up}; is the checkpoint whole?"
            )
        return cls(model.eval().requires_grad_(False).to(device), config)

    @property
    def device_name(self) -> str:
        """What the device is: of a GPU its model."""
        if self.device.type == "cuda":
            return f"{self.device} {torch.cuda.get_device_name(self.device)}"
        return str(self.device)

    def allocate(self, num_blocks: int) -> None:
        """Make room for num_blocks KV blocks. Zeroed, since a masked slot still enters a product with weight 0."""
        layers = [self.kv_layout.layers.get(i, (0, 0, 0)) for i in range(max(self.kv_layout.layers) + 1)]
        self._keys = [self._zeros(num_blocks, self.block_size, heads, key) for heads, key, _ in layers]
        self._values = [self._zeros(num_blocks, self.block_size, heads, value) for heads, _, value in layers]

    def _zeros(self, *shape: int) -> Tensor:
        """On a CPU from numpy, which leaves untouched pages to the operating system: unused blocks cost no memory."""
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        return torch.from_numpy(np.zeros(shape, dtype=f"i{self.dtype.itemsize}")).view(self.dtype)

    @torch.inference_mode()
    def forward(self, inputs: InputBatch) -> Tensor:
        """Run T rows, write their KV, and return the logits [L, V] of inputs.logit_rows."""
        metadata = AttentionMetadata(
            slot_mapping=self._tensor(inputs.slot_mapping),
            groups=build_groups(inputs, self.block_size, self.device, by_row=self.deterministic),
            keys=self._keys,
            values=self._values,
            chunk_sizes=self._chunk_sizes,
        )
        rows = self._tensor(inputs.logit_rows)
        return self._run(self._tensor(inputs.input_ids), self._tensor(inputs.positions), rows, metadata)

    def _run(self, input_ids: Tensor, positions: Tensor, rows: Tensor, metadata: Any) -> Tensor:
        keep = rows if len(rows) else rows.new_zeros(1)  # a batch of prefill chunks alone wants no logits
        logits: Tensor = self.model(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=keep,
            specrun=metadata,
        ).logits[0]
        if logits.shape[0] == len(input_ids) != len(keep):  # a family that ignores logits_to_keep
            logits = logits[keep]
        return logits[: len(rows)]

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, torch.long, non_blocking=True)

    @torch.inference_mode()
    def _probe_kv_layout(self) -> KVLayout:
        """Ask the model itself: one row through an attention that only looks at shapes."""
        probe = KVShapes()
        zero = torch.zeros(1, dtype=torch.long, device=self.device)
        try:
            self._run(zero, zero, zero, probe)
        except RuntimeError as exc:
            raise ModelError(f"{self._family} cannot run on a paged cache: {exc}") from exc
        if not probe.layers:
            raise ModelError(f"{self._family} does not use transformers' attention interface; it is not supported")
        return KVLayout(probe.layers, self.dtype)

    @property
    def _family(self) -> str:
        return f"model type {self.model.config.model_type!r}"

    def _check_sequences(self) -> list[np.ndarray[Any, Any]]:
        rng = np.random.default_rng(0)
        return [rng.integers(0, self.vocab_size, n) for n in (2 * self.block_size + 9, self.block_size + 7)]

    @torch.inference_mode()
    def _plain_logits(self) -> list[Tensor]:
        """Logits of the check sequences by transformers alone."""
        return [
            self.model(input_ids=torch.from_numpy(ids)[None].to(self.device), use_cache=False).logits[0]
            for ids in self._check_sequences()
        ]

    def _self_check(self, plain: list[Tensor]) -> None:
        """Two sequences, chunk by chunk, interleaved on shuffled blocks, against plain forward passes."""
        sequences = self._check_sequences()
        num_blocks = [-(-len(ids) // self.block_size) for ids in sequences]
        self.allocate(sum(num_blocks) + 1)
        shuffled = np.random.default_rng(0).permutation(sum(num_blocks)) + 1
        tables = np.zeros((2, max(num_blocks)), dtype=np.int32)
        tables[0, : num_blocks[0]] = shuffled[: num_blocks[0]]
        tables[1, : num_blocks[1]] = shuffled[num_blocks[0] :]
        cuts = [(0, self.block_size + 2, self.block_size + 3, len(sequences[0])), (0, 4, 5, len(sequences[1]))]
        worst = 0.0
        for step in range(3):
            spans = [(cut[step], cut[step + 1]) for cut in cuts]
            logits = self.forward(_check_batch(sequences, spans, tables, self.block_size))
            wanted = torch.cat([plain[i][start:stop] for i, (start, stop) in enumerate(spans)])
            error = (logits.double() - wanted.double()).square().mean().sqrt()
            worst = max(worst, float(error / wanted.double().std().clamp_min(1e-12)))
        self._keys, self._values = [], []
        if not worst <= TOLERANCE[self.dtype]:
            raise ModelError(
                f"{self._family} gives other logits on a paged cache than in a plain forward pass "
                f"(relative error {worst:.2g}); it is not supported"
            )
        logging.getLogger(__name__).debug("self-check: relative error %.2g", worst)


def _format_kwargs(checkpoint: Checkpoint) -> dict[str, Any]:
    """Safetensors only, never a pickle; GGUF weights unpacked, where transformers could keep them packed."""
    if checkpoint.gguf_file is None:
        return {"use_safetensors": True}
    gguf_config = getattr(transformers, "GgufConfig", None)  # since 5.24; before, GGUF is always unpacked
    unpack = {"quantization_config": gguf_config(dequantize=True)} if gguf_config else {}
    return {**checkpoint.from_pretrained_kwargs(), **unpack}


def _check_batch(
    sequences: list[np.ndarray[Any, Any]], spans: list[tuple[int, int]], tables: np.ndarray[Any, Any], block_size: int
) -> InputBatch:
    """Rows start .. stop of each sequence."""
    query_lens = np.array([stop - start for start, stop in spans], dtype=np.int32)
    positions = np.concatenate([np.arange(start, stop) for start, stop in spans])
    owner = np.repeat(np.arange(len(spans)), query_lens)
    return InputBatch(
        input_ids=np.concatenate([ids[start:stop] for ids, (start, stop) in zip(sequences, spans, strict=True)]),
        positions=positions,
        slot_mapping=tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size,
        query_lens=query_lens,
        cu_seqlens=np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
        seq_lens=np.array([stop for _, stop in spans], dtype=np.int32),
        block_tables=tables,
        logit_rows=np.arange(len(positions)),
    )


def _refuse_unsupported(model: Any, config: EngineConfig) -> None:
    text_config = model.config.get_text_config()
    unknown = set(getattr(text_config, "layer_types", None) or ()) - LAYER_TYPES
    unknown |= {
        type(m).__name__ for m in model.modules() if isinstance(m, torch.nn.Conv1d) or "Mamba" in type(m).__name__
    }
    if unknown:
        raise ModelError(
            f"model type {model.config.model_type!r} has layers that are not attention ({', '.join(sorted(unknown))}); "
            "only full, sliding and chunked attention are supported"
        )
    if config.deterministic and model.dtype is not torch.float64 and any(p.ndim == 3 for p in model.parameters()):
        raise ModelError("engine.deterministic is not supported for mixture-of-experts models in this dtype")


def _eos_token_ids(model: Any) -> frozenset[int]:
    found: set[int] = set()
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    return frozenset(found)


def _chunk_sizes(text_config: Any, num_layers: int) -> list[int | None]:
    types = getattr(text_config, "layer_types", None) or [""] * num_layers
    chunk = getattr(text_config, "attention_chunk_size", None)
    return [chunk if kind == "chunked_attention" else None for kind in types]


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"engine.device is {name} but torch sees no CUDA device; set engine.device to auto or cpu")
    return torch.device(name)


def _dtype(checkpoint: Checkpoint, config: EngineConfig) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if checkpoint.gguf_file is not None:
        return torch.bfloat16
    declared = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=config.trust_remote_code)
    dtype = getattr(declared.get_text_config(), "dtype", None) or torch.float32
    return dtype if isinstance(dtype, torch.dtype) else DTYPES[str(dtype).removeprefix("torch.")]
