"""The engine on a CUDA device, by its naive path: the same tokens as on the CPU, with and without speculation."""

import pytest
import torch

from specrun.engine import EngineConfig, SamplingParams
from specrun.engine.drafters.ngram import NgramDrafter
from specrun.engine.engine import Engine
from specrun.engine.target import Target
from tests.engine.tiny_models import (
    Budget,
    RandomPolicy,
    build_model,
    essence,
    make_prompts,
    make_requests,
    one_at_a_time,
    run,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_same_tokens_as_on_the_cpu(family: str, temperature: float) -> None:
    prompts = make_prompts(8, seed=0)
    params = [SamplingParams(max_tokens=24, temperature=temperature, seed=i) for i in range(len(prompts))]
    wanted = one_at_a_time(family, prompts, params)
    settings = EngineConfig(num_kv_blocks=64, max_num_seqs=4, max_num_batched_tokens=16)
    target = Target(build_model(family).to("cuda"), settings)
    for policy in (Budget(0), Budget(5), RandomPolicy(0)):
        got = run(Engine(target, settings, policy, NgramDrafter()), make_requests(prompts, params))
        assert {i: essence(o) for i, o in got.items()} == {i: essence(o) for i, o in wanted.items()}


def test_kv_cache_is_sized_from_free_memory() -> None:
    target = Target(build_model("llama").to("cuda"), EngineConfig())
    engine = Engine(target, EngineConfig(max_num_seqs=2), Budget(0))
    assert engine.blocks.num_blocks == 2 * engine.max_model_len // 16
