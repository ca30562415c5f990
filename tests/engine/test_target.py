"""What the target runs, what it refuses, and how it reads a checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specrun.engine import Checkpoint, EngineConfig, ModelError, resolve_checkpoint
from specrun.engine.target import Target
from tests.engine.tiny_models import EOS, FAMILIES, SLIDING, build_model

CPU = EngineConfig(device="cpu")
OTHERS: dict[str, dict[str, Any]] = {
    "gpt_oss": {  # attention sinks
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "llama4_text": {  # chunked attention
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8,
        "intermediate_size_mlp": 48,
        "no_rope_layers": [1, 1, 1, 0],
    },
    "deepseek_v3": {  # values of another size than keys
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "first_k_dense_replace": 1,
    },
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "phi3": {},
    "olmo3": {"sliding_window": 6, "layer_types": SLIDING},
    "cohere2": {"sliding_window": 6},
}


def refused(family: str, config: EngineConfig = CPU, **overrides: Any) -> str:
    model = build_model(family, **overrides)
    with pytest.raises(ModelError) as caught:
        Target(model, config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_pass_the_self_check(family):
    target = Target(build_model(family, **OTHERS[family]), CPU)
    assert target.eos_token_ids == {EOS} and target.max_model_len == 128


@pytest.mark.parametrize("block_size", [1, 2, 4, 16, 64])
def test_the_self_check_works_for_any_block_size(block_size):
    assert Target(build_model("mistral", max_position_embeddings=512), EngineConfig(block_size=block_size))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}),
        ("qwen3_5_text", {"head_dim": 8}),
    ],
)
def test_layers_that_are_not_attention_are_refused_by_name(family, overrides):
    text = refused(family, **overrides)
    assert family in text and "not attention" in text


def test_a_family_that_keeps_keywords_to_itself_is_refused():
    text = refused("stablelm")
    assert "stablelm" in text and "keywords" in text


def test_a_family_with_its_own_attention_is_refused():
    text = refused("bloom", n_layer=4, n_head=4)
    assert "bloom" in text and "attention interface" in text


class Neighbours(torch.nn.Module):
    """Mixes each row with the one before it, as a convolution would; no config says so."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.inner(x + x.roll(1, dims=1))
        return mixed


def test_the_self_check_refuses_a_model_that_mixes_rows_outside_attention():
    model = build_model("llama")
    model.model.layers[1].mlp = Neighbours(model.model.layers[1].mlp)
    with pytest.raises(ModelError, match="other logits"):
        Target(model, CPU)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_check_refuses_a_window_that_is_one_off(family, monkeypatch):
    """Families without windows get one; the check must see a single key too many or too few."""
    from specrun.engine.attention import AttentionGroup

    right = AttentionGroup.mask
    monkeypatch.setattr(
        AttentionGroup,
        "mask",
        lambda g, window, chunk, dtype, repeats: right(g, (window or 9) - 1, chunk, dtype, repeats),
    )
    with pytest.raises(ModelError, match="other logits"):
        Target(build_model(family), CPU)


def test_max_model_len():
    assert Target(build_model("llama"), EngineConfig(max_model_len=50)).max_model_len == 50
    assert "129" in refused("llama", EngineConfig(max_model_len=129))


def test_long_rope_keeps_to_the_length_where_requests_do_not_change_each_other():
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
    }
    model = build_model("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    assert Target(model, CPU).max_model_len == 64
    model = build_model("phi3", rope_parameters=rope, original_max_position_embeddings=4096)
    assert Target(model, CPU).max_model_len == 128


def test_end_of_sequence_ids_come_from_both_configs():
    model = build_model("llama", eos_token_id=[2, 5])
    model.generation_config.eos_token_id = 7
    assert Target(model, CPU).eos_token_ids == {2, 5, 7}


def test_deterministic_mode_refuses_experts_in_low_precision():
    model = build_model("qwen3_moe", torch.float32)
    with pytest.raises(ModelError, match="deterministic"):
        Target(model, EngineConfig(deterministic=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_device(tmp_path):
    with pytest.raises(ModelError, match=r"engine\.device is cuda:1"):
        Target.load(Checkpoint("m", tmp_path), EngineConfig(device="cuda:1"))


def saved(tmp_path, **options: Any) -> Any:
    model = build_model("llama", torch.float32)
    model.save_pretrained(tmp_path, **options)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=torch.arange(3, 30)[None], use_cache=False).logits
    return found


def test_a_sharded_folder_loads(tmp_path, monkeypatch):
    """The plain logits that the self-check starts from are those of the model that was saved."""
    model = saved(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    seen = []
    plain = Target._plain_logits

    def spy(self):
        seen.append(logits(self.model))
        return plain(self)

    monkeypatch.setattr(Target, "_plain_logits", spy)
    target = Target.load(resolve_checkpoint(str(tmp_path)), CPU)
    assert target.dtype is torch.float32
    assert torch.allclose(seen[0], logits(model), atol=1e-5)
    assert Target.load(resolve_checkpoint(str(tmp_path)), EngineConfig(dtype="float64")).dtype is torch.float64


def load_error(tmp_path) -> str:
    with pytest.raises(ModelError) as caught:
        Target.load(resolve_checkpoint(str(tmp_path)), CPU)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
    return str(caught.value)


def test_a_folder_of_pickled_weights_does_not_load(tmp_path):
    model = saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled"):
        resolve_checkpoint(str(tmp_path))
    with pytest.raises(ModelError, match="cannot load"):
        Target.load(Checkpoint("m", tmp_path), CPU)


def test_a_cut_weights_file(tmp_path):
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    load_error(tmp_path)


def test_a_missing_shard(tmp_path):
    saved(tmp_path, max_shard_size="20KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    load_error(tmp_path)


def test_missing_weights_are_not_made_up(tmp_path):
    from safetensors.torch import load_file, save_file

    saved(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "up_proj" in load_error(tmp_path)


def test_an_unknown_model_type(tmp_path):
    saved(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"no_such_family"'))
    assert "no_such_family" in load_error(tmp_path)


def test_a_broken_config(tmp_path):
    saved(tmp_path)
    (tmp_path / "config.json").write_text("{ not json")
    load_error(tmp_path)


def test_a_batch_of_prefill_chunks_alone_has_no_logits():
    from specrun.engine.input_batch import InputBatch

    target = Target(build_model("llama"), CPU)
    target.allocate(4)
    one = np.array([3], np.int32)
    inputs = InputBatch(
        input_ids=np.array([5, 6, 7]),
        positions=np.arange(3),
        slot_mapping=np.arange(16, 19),
        query_lens=one,
        cu_seqlens=np.array([0, 3], np.int32),
        seq_lens=one,
        block_tables=np.array([[1]], np.int32),
        logit_rows=np.zeros(0, np.int64),
    )
    assert target.forward(inputs).shape == (0, target.vocab_size)
