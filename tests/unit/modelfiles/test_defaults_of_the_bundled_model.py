"""What a silent request gets: the operator's word, else the model's files, else the default of the alias."""

import pytest

from core.config import load_config
from core.errors import ConfigError
from gateway.models import ServedModel
from modelfiles.config import GenerationDefaults
from modelfiles.model import open_model


def test_the_bundled_model_is_greedy_unless_asked_otherwise() -> None:
    defaults = open_model("smollm2-135m-instruct").generation_defaults
    assert (defaults.temperature, defaults.top_p, defaults.max_new_tokens) == (0.0, None, None)


def test_a_file_is_not_overruled_by_a_recommendation() -> None:
    said = GenerationDefaults(temperature=0.0)
    assert said.or_else(GenerationDefaults(temperature=0.2, top_p=0.9)) == GenerationDefaults(
        temperature=0.0, top_p=0.9
    )


def test_the_operator_has_the_last_word() -> None:
    config = load_config(overrides=["models.0.generation={temperature: 0.7, max_new_tokens: 40}"], environ={})
    defaults = ServedModel.load(config.models[0]).defaults
    assert (defaults.temperature, defaults.top_p, defaults.max_new_tokens) == (0.7, None, 40)
    with pytest.raises(ConfigError, match="top_p is 2"):
        load_config(overrides=["models.0.generation.top_p=2"], environ={})
