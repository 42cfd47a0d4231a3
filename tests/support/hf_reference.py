"""The reference: Hugging Face `transformers`, float32, on the weights that Baton reads from the files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM as AutoModel
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedConfig, PreTrainedModel

from modelfiles.config import ModelConfig
from modelfiles.model import ModelFiles

MAX_GAP = 1e-3
"""Law 3: a first divergence is allowed where the reference's top two are closer than this ..."""
MAX_ERROR = 1e-4
"""... while teacher-forced logits agree to this."""


class HfReference:
    """A model of `transformers`: with the dequantised weights of `files`, or one that is there already."""

    def __init__(self, files: ModelFiles | None = None, *, model: PreTrainedModel | None = None) -> None:
        if model is None:
            assert files is not None
            model = AutoModel.from_config(_CONFIGS[files.config.architecture](files.config))
            weights = {name: _tensor(files, name) for name in files.tensor_names()}
            outcome = model.load_state_dict(weights, strict=False, assign=True)
            assert not outcome.unexpected_keys and set(outcome.missing_keys) <= {"lm_head.weight"}, outcome
            model.tie_weights()
        self._model = model.eval()

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], *, last: int = 0) -> Tensor:
        """Teacher-forced scores of every position, `[len(tokens), vocabulary]`, or of so many `last` ones."""
        result: Tensor = self._model(torch.tensor([list(tokens)]), use_cache=False, logits_to_keep=last).logits[0]
        return result

    def exact_logits(self, tokens: Sequence[int]) -> Tensor:
        """The same in float64: the arbiter between two float32 implementations. Slow."""
        self._model.double()
        try:
            return self.logits(tokens)
        finally:
            self._model.float()  # float32 weights survive the way there and back

    def check_greedy(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        teacher_forced: Callable[[list[int]], Tensor] | None = None,
    ) -> int | None:
        """Law 3 for a greedy `answer`. Returns None when it is the reference's, else the index of the first divergence.

        Every token is held against the reference's choice behind the same tokens, in one pass. A divergence raises
        unless it is a near tie of the reference. `teacher_forced` gives the engine's scores of every position of some
        tokens; with it, the scores that the diverging choice was made from are compared too.
        """
        rows = self.logits([*prompt, *answer], last=len(answer) + 1)[:-1]
        chosen = rows.argmax(-1).tolist()
        if chosen == list(answer):
            return None
        at = next(i for i, (mine, theirs) in enumerate(zip(answer, chosen, strict=True)) if mine != theirs)
        best = rows[at].topk(2).values
        gap = float(best[0] - best[1])
        assert gap < MAX_GAP, f"token {at}: {answer[at]} instead of {chosen[at]}, and no near tie (gap {gap:.2e})"
        if teacher_forced is not None:
            error = float((teacher_forced([*prompt, *answer[:at]])[-1] - rows[at]).abs().max())
            assert error <= MAX_ERROR, f"teacher-forced logits differ by {error:.2e}"
        return at


def _tensor(files: ModelFiles, name: str) -> Tensor:
    return torch.from_numpy(np.array(files.load_tensor(name), dtype=np.float32))


def _shape(config: ModelConfig) -> dict[str, object]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_context,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _llama(config: ModelConfig) -> PreTrainedConfig:
    assert config.rope_scaling is None
    return LlamaConfig(**_shape(config), rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta})


def _gemma3(config: ModelConfig) -> PreTrainedConfig:
    """Window, pattern and bases are written here once more, from the model's public description."""
    return Gemma3TextConfig(**_shape(config), sliding_window=512, query_pre_attn_scalar=256)


_CONFIGS: dict[str, Callable[[ModelConfig], PreTrainedConfig]] = {"llama": _llama, "gemma3_text": _gemma3}
