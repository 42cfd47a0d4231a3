"""Opens a model, whatever form it has on disk: one object that answers every question about its files.

model = open_model("smollm2-135m-instruct")
model.config.num_layers, model.load_tensor("model.norm.weight"), model.tokenizer(), model.chat_template()
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import tokenizers

from modelfiles.chat_template import ChatTemplate
from modelfiles.config import GenerationDefaults, ModelConfig
from modelfiles.errors import ModelFileError
from modelfiles.folder_config import config_from_folder, generation_defaults_from_folder
from modelfiles.gguf_file import GGUFFile
from modelfiles.gguf_tokenizer import tokenizer_from_gguf
from modelfiles.json_file import JsonFile
from modelfiles.locate import Location, locate
from modelfiles.safetensors_file import SafetensorsSource
from modelfiles.tensors import Array, TensorSource, sampled_digest
from modelfiles.tokenizer import Tokenizer, parsed_tokenizer


class ModelFiles:
    """What one model's files say. Tensors and tokenizer are read when asked for; opening reads headers only."""

    def __init__(self, location: Location) -> None:
        self.name = location.name
        self.path = str(location.path)
        self._folder: Path | None = None
        self._gguf: GGUFFile | None = None
        if location.path.is_dir():
            self._folder = location.path
            self.config: ModelConfig = config_from_folder(location.path)
            self.generation_defaults: GenerationDefaults = generation_defaults_from_folder(location.path)
            source = SafetensorsSource(location.path)
            self._tensors: TensorSource = source
            files = source.files
        else:
            self._gguf = GGUFFile(location.path)
            self.config = self._gguf.config()
            self.generation_defaults = self._gguf.generation_defaults()
            self._tensors = self._gguf
            files = self._gguf.files
        self.generation_defaults = self.generation_defaults.or_else(location.generation_defaults)
        self.digest = sampled_digest(repr(self.config), files)
        self._tokenizer: Tokenizer | None = None
        self._chat_template: ChatTemplate | None = None

    def tensor_names(self) -> tuple[str, ...]:
        """Names as in the Hugging Face implementation of the architecture."""
        return self._tensors.names()

    def file_of(self, name: str) -> str:
        """The file that holds the tensor, or the model's path: what an error about it names."""
        return str(self._tensors.file_of(name))

    def load_tensor(self, name: str) -> Array:
        """One tensor in Hugging Face's layout: float32 where the file is quantised or bfloat16, else as stored.

        The array may be a read-only view of the file.
        """
        return self._tensors.load(name)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, built at the first call (tenths of a second)."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._rust_tokenizer(), self.path)
            if self._tokenizer.num_tokens > self.config.vocab_size:
                raise ModelFileError(
                    self.file_of("model.embed_tokens.weight"),
                    f"the tokenizer has {self._tokenizer.num_tokens} ids, tensor 'model.embed_tokens.weight' "
                    f"{self.config.vocab_size} rows",
                    "use tokenizer and weights of the same model",
                )
        return self._tokenizer

    def chat_template(self) -> ChatTemplate | None:
        """The compiled chat template, or None for a model without one."""
        if self._chat_template is None:
            source = self._chat_template_source()
            if source is None:
                return None
            tokenizer = self.tokenizer()
            bos, eos = self.config.bos_token_id, self.config.eos_token_ids
            self._chat_template = ChatTemplate(
                source,
                self.path,
                bos_text="" if bos is None else tokenizer.token_text(bos),
                eos_text=tokenizer.token_text(eos[0]) if eos else "",
            )
        return self._chat_template

    def text_digest(self) -> str:
        """Digest of tokenizer and chat template together: equal digests give equal prompt ids."""
        template = self.chat_template()
        parts = self.tokenizer().digest + (template.digest if template else "")
        return hashlib.sha256(parts.encode()).hexdigest()

    def _rust_tokenizer(self) -> tokenizers.Tokenizer:
        if self._gguf is not None:
            return tokenizer_from_gguf(self._gguf)
        assert self._folder is not None
        path = self._folder / "tokenizer.json"
        if not path.exists():
            raise ModelFileError(str(path), "is missing", "use a Hugging Face folder with a fast tokenizer")
        return parsed_tokenizer(path.read_bytes(), str(path))

    def _chat_template_source(self) -> str | None:
        if self._gguf is not None:
            value = self._gguf.value("tokenizer.chat_template")
            return value if isinstance(value, str) else None
        assert self._folder is not None
        path = self._folder / "chat_template.jinja"
        if path.exists():
            return path.read_text(encoding="utf-8")
        config_path = self._folder / "tokenizer_config.json"
        if not config_path.exists():
            return None
        value = JsonFile(config_path).values.get("chat_template")
        if isinstance(value, list):  # several named templates: the default one
            named = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
            value = named.get("default")
        return value if isinstance(value, str) else None


def open_model(path: str) -> ModelFiles:
    """Opens an alias, a .gguf file, a Hugging Face folder or a hub id. Raises `ModelFileError` with the remedy."""
    return ModelFiles(locate(path))
