"""Whole jobs: on the stub engine, and on a tiny model that lies on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runner.conftest import Job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder."""
    from tests.contract import tiny_model

    return tiny_model.save(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def model_job(job: Job, tiny_model: Path) -> Job:
    """A job on the tiny model, in fp64 on the CPU; run it with run_job(job.spec)."""
    job.set(model__path=str(tiny_model), model__dtype="float64", engine__device="cpu", output__token_ids=True)
    return job.set(prompt__chat_template="none", speculation__method="none", errors__max_failed_fraction=1.0)
