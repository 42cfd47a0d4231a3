"""The reference: Hugging Face `transformers`, float32, on the weights that Baton reads from the files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from modelfiles.model import ModelFiles

MAX_GAP = 1e-3
"""Law 3: a first divergence is allowed where the reference's top two are closer than this ..."""
MAX_ERROR = 1e-4
"""... while teacher-forced logits agree to this."""


class HfReference:
    """A Llama model of `transformers` with the dequantised weights of `files`."""

    def __init__(self, files: ModelFiles) -> None:
        config = files.config
        assert config.architecture == "llama" and config.rope_scaling is None
        hf_config = LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tie_word_embeddings,
            max_position_embeddings=config.max_context,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        self._model = LlamaForCausalLM(hf_config)
        weights = {
            name: torch.from_numpy(np.array(files.load_tensor(name), dtype=np.float32)) for name in files.tensor_names()
        }
        outcome = self._model.load_state_dict(weights, strict=False)
        assert not outcome.unexpected_keys and set(outcome.missing_keys) <= {"lm_head.weight"}, outcome
        self._model.tie_weights()
        self._model.eval()

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Teacher-forced scores of every position, `[len(tokens), vocabulary]`."""
        result: Tensor = self._model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
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
        rows = self.logits([*prompt, *answer])[len(prompt) - 1 : -1]
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
