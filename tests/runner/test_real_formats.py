"""Response formats on a real model and vocabulary: the same with drafts and without, and valid."""

import json

import jsonschema
import pytest
import torch

from specrun.engine import EngineConfig, Request, SamplingParams
from specrun.engine.drafters.suffix import SuffixDrafter
from specrun.engine.engine import Engine
from specrun.engine.target import Target
from specrun.jobs.response_format import ResponseFormat
from specrun.runner.grammar import GrammarCompiler
from specrun.runner.tokenizer import Tokenizer
from tests.engine import smollm2
from tests.engine.tiny_models import Budget

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["city", "size"],
    "additionalProperties": False,
}


@pytest.mark.slow
def test_drafts_do_not_show_in_what_a_format_gives():
    target = Target(smollm2.model(torch.float32), EngineConfig(deterministic=True))
    tokenizer = Tokenizer.from_checkpoint(smollm2.checkpoint())
    compiler = GrammarCompiler(tokenizer, target.vocab_size, target.eos_token_ids)
    formats = [ResponseFormat("json_schema", json.dumps(SCHEMA)), ResponseFormat("choice", '["yes","no"]'), None]

    def run(num_drafts: int) -> list[list[int]]:
        config = EngineConfig(deterministic=True, num_kv_blocks=64, max_num_seqs=3)
        engine = Engine(target, config, Budget(num_drafts), SuffixDrafter(1000), tokenizer.token_bytes())
        params = [SamplingParams(max_tokens=n, temperature=0.7 * (n % 2), seed=n) for n in (40, 9, 12)]
        requests = [
            Request(i, list(prompt), params[i], grammar=compiler.compile(form) if form else None)
            for i, (prompt, form) in enumerate(zip(smollm2.prompts(3, longest=60), formats, strict=True))
        ]
        outputs = {output.request_id: output for output in engine.run(requests)}
        assert not any(output.error for output in outputs.values())
        return [outputs[i].token_ids for i in range(3)]

    plain = run(0)
    assert run(4) == plain
    answer, choice, _ = tokenizer.decode_batch(plain)
    jsonschema.validate(json.loads(answer), SCHEMA)
    assert choice in ("yes", "no")
