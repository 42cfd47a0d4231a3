"""What the steps of :mod:`bench.gpu` share: the device, the model's shape with random weights made on the device, and
a clock that waits for the device.

On a GPU the shape is that of Qwen3-8B in bfloat16. With the interpreter it is a tiny one in float32: its times mean
nothing, but every line runs.
"""

import json
import statistics
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from core.ids import RequestId
from core.types import SamplingParams
from engine.device import Device, resolve_device
from engine.engine import Engine, EngineConfig
from engine.model.decoder import Decoder
from engine.sequence import Sequence, SequenceKey
from modelfiles.config import ModelConfig
from modelfiles.model import ModelFiles, open_model

QWEN3_8B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TINY = {
    **QWEN3_8B,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 288,
    "max_position_embeddings": 256,
}
_SCALE = 0.02
"""Of random weights: as trained ones begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured with a model of this size."""

    prompt: int
    """Tokens of a short prompt, as in the reference trace ..."""
    answer: int
    """... and of its answer."""
    streams: int
    contexts: tuple[tuple[int, int], ...]
    """(rows, context) of decode steps."""
    prefills: tuple[int, ...]
    """Tokens of prompts beside the short one."""
    hand_over: int
    """Tokens of the prompt that is handed over."""
    bandwidth_bytes: int
    matrix: int
    """Rows and columns of the product that gives the matrix rate."""
    max_context: int
    chunk: int
    repeats: int


LARGE = Sizes(
    prompt=43,
    answer=93,
    streams=64,
    contexts=((1, 128), (8, 2048), (64, 640), (64, 2048), (256, 128)),
    prefills=(512, 2048, 4096, 8192),
    hand_over=3500,
    bandwidth_bytes=8 << 30,
    matrix=8192,
    max_context=8448,
    chunk=8192,
    repeats=20,
)
SMALL = Sizes(
    prompt=5,
    answer=4,
    streams=2,
    contexts=((1, 9), (2, 20)),
    prefills=(20,),
    hand_over=20,
    bandwidth_bytes=1 << 16,
    matrix=32,
    max_context=64,
    chunk=32,
    repeats=1,
)


class RandomWeights:
    """:class:`~engine.model.weights.Weights` that nobody trained, made on the device: speed does not depend on the
    values, but never use zeros."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def has(self, name: str) -> bool:
        return name.endswith(".weight")

    def tensor(self, name: str, *shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=self._generator, device=self._device, dtype=self._dtype).mul_(_SCALE)
        return drawn.add_(1) if name.endswith("norm.weight") else drawn

    def fused(
        self, parts: Mapping[str, int], num_inputs: int, *, has_bias: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        return self.tensor("weight", sum(parts.values()), num_inputs), None

    def check_all_read(self, *unused: str) -> None:
        """There is no file."""


class Setup:
    """One process's device and model. ``folder`` is written to."""

    def __init__(self, device: str, folder: Path, *, seed: int = 0) -> None:
        self.device: Device = resolve_device(device)
        self.seed = seed
        self.is_gpu = self.device is Device.CUDA
        self.sizes = LARGE if self.is_gpu else SMALL
        self.dtype = "bfloat16" if self.is_gpu else "float32"
        self.torch_dtype = getattr(torch, self.dtype)
        self.torch_device = self.device.torch
        self._folder = folder

    @cached_property
    def shape(self) -> dict[str, Any]:
        return dict(QWEN3_8B if self.is_gpu else TINY)

    @cached_property
    def files(self) -> ModelFiles:
        """Config and tokenizer; of the tensors a first one that is not read."""
        folder = self._folder / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.shape))
        vocabulary = {byte: token for token, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(folder / "tokenizer.json"))
        header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<f", 1.0))
        return open_model(str(folder))

    @property
    def config(self) -> ModelConfig:
        return self.files.config

    @cached_property
    def model(self) -> Decoder:
        weights = RandomWeights(self.torch_device, self.torch_dtype, self.seed)
        return Decoder(
            self.files,
            max_context=self.sizes.max_context,
            dtype=self.dtype,
            device=self.device,
            invariant=False,
            weights=weights,
        )

    def engine(self, **options: Any) -> Engine:
        """On :attr:`model`. Without a prefix cache: prompts are to be computed."""
        sizes = self.sizes
        config = EngineConfig(
            device=self.device,
            dtype=self.dtype,
            max_context=sizes.max_context,
            max_step_tokens=sizes.chunk,
            max_sequences=sizes.streams,
            num_blocks=sizes.streams * 16 + 2 * sizes.max_context // 16,
            invariant=False,
            prefix_cache=False,
        )
        return Engine(self.files, replace(config, **options), model=self.model)

    # -- floors of the shape ------------------------------------------------------------------------------------------

    @property
    def weight_bytes(self) -> int:
        """Read by a step: all but the embedding, of which some rows are."""
        config = self.config
        per_layer = config.hidden_size * (2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size)
        numbers = config.num_layers * per_layer + config.vocab_size * config.hidden_size
        return int(numbers * self.torch_dtype.itemsize)

    @property
    def kv_bytes(self) -> int:
        """Of one token."""
        return int(2 * self.config.num_layers * self.config.kv_size * self.torch_dtype.itemsize)

    def flops(self, num_tokens: int) -> float:
        """Of a prompt: products of all tokens, the head of one, and causal attention."""
        config = self.config
        head = config.vocab_size * config.hidden_size
        linears = self.weight_bytes / self.torch_dtype.itemsize - head
        attention = 2 * config.num_layers * config.q_size * num_tokens**2
        return float(2 * linears * num_tokens + 2 * head + attention)

    # -- a clock ------------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], object], *, repeats: int | None = None, warm_up: int = 2) -> float:
        """The median, by the device's own events where it has them."""
        for _ in range(warm_up if self.is_gpu else 0):
            run()
        self.synchronize()
        times: list[float] = []
        for _ in range(repeats or self.sizes.repeats):
            if self.is_gpu:
                began, ended = _event(), _event()
                began.record()
                run()
                ended.record()
                ended.synchronize()
                times.append(began.elapsed_time(ended) / 1e3)
            else:
                at = time.perf_counter()
                run()
                times.append(time.perf_counter() - at)
        return statistics.median(times)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of this device, in this run."""

    read_bytes_per_s: float
    copy_bytes_per_s: float
    """Bytes read and bytes written."""
    flops_per_s: float


def measure_rates(setup: Setup) -> Rates:
    """Over random data larger than any cache: zeros are faster."""
    sizes, device = setup.sizes, setup.torch_device
    words = torch.randint(1, 1 << 30, (sizes.bandwidth_bytes // 4,), dtype=torch.int32, device=device)
    # A sum of float32 reads as fast as memory goes; the bits of these integers are ordinary numbers.
    numbers = words.view(torch.float32)
    read_s = min(setup.seconds(numbers.sum, repeats=5), setup.seconds(numbers.max, repeats=5))
    half = len(words) // 2
    copy_s = setup.seconds(lambda: words[:half].copy_(words[half : 2 * half]), repeats=5)
    left, right = (torch.randn(sizes.matrix, sizes.matrix, device=device, dtype=setup.torch_dtype) for _ in range(2))
    product_s = setup.seconds(lambda: left @ right, repeats=10, warm_up=3)
    return Rates(
        # A copy reads and writes: where it is faster than what torch reads with, it is the better measure of both.
        read_bytes_per_s=max(words.nbytes / read_s, 2 * half * 4 / copy_s),
        copy_bytes_per_s=2 * half * 4 / copy_s,
        flops_per_s=2 * sizes.matrix**3 / product_s,
    )


def stream(name: str, prompt: list[int], num_answer: int, **options: Any) -> Sequence:
    return Sequence(
        key=SequenceKey(RequestId(name), 1, 0),
        sampling=SamplingParams(temperature=0.0, max_tokens=num_answer, ignore_eos=True),
        tokens=list(prompt),
        **{"num_prompt_tokens": len(prompt), **options},
    )
