"""llama.cpp beside us: the npm package ``node-llama-cpp`` with its prebuilt library, for development only.

Nothing of it enters the project: it is installed into a cache folder when npm is there, and the files it needs are
made from the model at hand with the ``gguf`` package.
"""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE, VERSION = "node-llama-cpp", "3.22.1"
SCRIPT = Path(__file__).with_name("llama_cpp.mjs")
INSTALL_TIMEOUT_S = 300
RUN_TIMEOUT_S = 500
QUANTISATIONS = ("Q8_0", "Q4_1", "BF16")


class PeerUnavailable(Exception):
    """Why llama.cpp cannot be measured here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTimes:
    """CPU seconds of the whole process, one figure a round."""

    decode: dict[int, list[float]]
    """Of a step, by number of streams."""
    prefill: list[float]


def install(cache: Path) -> Path:
    """The folder with the package, installed when it is not there yet."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise PeerUnavailable("node and npm are not installed")
    folder = cache / f"{PACKAGE}-{VERSION}"
    if not (folder / "node_modules" / PACKAGE).is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        platform = subprocess.run(
            [node, "-p", "`${process.platform.replace('darwin', 'mac')}-${process.arch}`"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        packages = [f"{PACKAGE}@{VERSION}", f"@{PACKAGE}/{platform}@{VERSION}"]
        flags = ["--no-audit", "--no-fund", "--ignore-scripts", "--omit=optional"]
        try:
            done = subprocess.run(
                [npm, "install", *flags, "--prefix", str(folder), *packages],
                capture_output=True,
                text=True,
                timeout=INSTALL_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise PeerUnavailable(f"npm install took more than {INSTALL_TIMEOUT_S} s") from error
        if done.returncode:
            raise PeerUnavailable(f"npm install failed: {done.stderr.strip().splitlines()[-1:]}")
    return folder


def model_file(source: Path, quantisation: str, cache: Path) -> Path:
    """The model of a GGUF file with its matrices in ``quantisation``."""
    import gguf

    kind = gguf.GGMLQuantizationType[quantisation]
    reader = gguf.GGUFReader(source)
    stem = source.stem.removesuffix(".Q4_1")
    path = cache / f"{stem}-{source.stat().st_size}.{quantisation}.gguf"
    if path.is_file():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path.with_suffix(".part"), reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{quantisation}"])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_suffix(".part").rename(path)


def measure(folder: Path, model: Path, **options: Any) -> PeerTimes:
    script = folder / SCRIPT.name  # imports are looked up beside the file
    shutil.copy(SCRIPT, script)
    command = ["node", str(script), json.dumps({"model": str(model), **options})]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise PeerUnavailable(f"llama.cpp took more than {RUN_TIMEOUT_S} s on {model.name}") from error
    if done.returncode:
        raise PeerUnavailable(f"llama.cpp failed on {model.name}: {done.stderr.strip()[-300:]}")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return PeerTimes(decode={int(key): times for key, times in result["decode"].items()}, prefill=result["prefill"])
