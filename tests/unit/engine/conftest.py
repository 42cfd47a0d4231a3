"""Models for engine tests: a tiny random one, and the real default model once per session."""

from __future__ import annotations

import pytest
import torch

from engine.engine import Engine, EngineConfig
from modelfiles.model import ModelFiles, open_model
from tests.support.hf_reference import HfReference
from tests.support.random_llama import RandomLlama


@pytest.fixture(scope="session")
def tiny_files() -> RandomLlama:
    return RandomLlama()


@pytest.fixture(scope="session")
def real_files() -> ModelFiles:
    return open_model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def real_engine(real_files: ModelFiles) -> Engine:
    """The default model; other tests build engines that share its weights."""
    torch.set_num_threads(1)
    return Engine(real_files, EngineConfig(num_blocks=600))


@pytest.fixture(scope="session")
def reference(real_files: ModelFiles) -> HfReference:
    return HfReference(real_files)
