"""What can be wrong with a model's files, said in one line that ends with the remedy."""

from __future__ import annotations

from core.errors import ConfigError


class ModelFileError(ConfigError):
    """The model files cannot be used. The message names the file, what is wrong, and what to do."""

    def __init__(self, path: str, problem: str, remedy: str) -> None:
        super().__init__(f"{path}: {problem}; {remedy}")
        self.path = path
        self.problem = problem
        self.remedy = remedy
