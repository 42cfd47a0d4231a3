"""A process in which a source is compiled first, to see whether it can be: unlike a thread it may be killed.

Short sources can ask for minutes of work and gigabytes. The process has limits of processor time and memory that the
kernel enforces; when it dies of one, the source is refused, and the next one gets a new process. What it has compiled
stays there: a compiled grammar has no form in which moving it is cheaper than compiling it again.

It is started by the first source that needs it (it takes some seconds), and ends with the pipe to its parent.
One line of JSON each way: a vocabulary and "ready", then sources and outcomes.
"""

import json
import math
import os
import resource
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from core.errors import InternalError, InvalidRequest, ServingError
from core.grammar import GRAMMAR_PARAM, GrammarSource
from engine.grammar_compiler import Compiler

MEMORY_BYTES = 256 << 20
"""What one source may take while it is compiled."""
START_LIMIT_S = 120.0
WALL_FACTOR = 6.0
"""On a busy machine the clock runs ahead of the processor time that counts."""
NICENESS = 10
"""The steps of the worker go first."""


class Trial:
    """The parent's side. Used by one thread; :meth:`close` from any."""

    def __init__(self, compiler: Compiler, *, limit_s: float, max_bytes: int, memory_bytes: int = MEMORY_BYTES) -> None:
        self._compiler = compiler
        self._limit_s = limit_s
        self._max_bytes = max_bytes
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._is_closed = False

    def check(self, source: str) -> None:
        """Raises InvalidRequest for what is no grammar, or takes more than ``limit_s`` of processor time,
        ``memory_bytes`` on the way, or ``max_bytes`` when it is done."""
        process = self._started()
        answer = self._ask(process, source, WALL_FACTOR * self._limit_s)
        if answer is None:
            self._end(process)
            raise self._refusal(f"takes more than {self._limit_s:g} s or {self._memory_bytes >> 20} MB to compile")
        outcome = json.loads(answer)
        if "error" in outcome:
            raise InvalidRequest(outcome["error"], param=GRAMMAR_PARAM, code="invalid_grammar")
        if outcome["num_bytes"] > self._max_bytes:
            raise self._refusal(f"takes {outcome['num_bytes'] >> 20} MB when compiled")

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            process = self._process
        if process is not None:
            self._end(process)

    def _started(self) -> "subprocess.Popen[str]":
        with self._lock:
            if self._is_closed:
                raise InternalError("the worker stops")
            if self._process is None:
                command = [sys.executable, "-m", "engine.grammar_trial"]
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
                is_new = True
            else:
                is_new = False
            process = self._process
        if is_new:
            hello = {
                "vocabulary": [one.hex() for one in self._compiler.vocabulary()],
                "eos_token_ids": self._compiler.eos_token_ids,
                "limit_s": self._limit_s,
                "memory_bytes": self._memory_bytes,
            }
            if self._ask(process, json.dumps(hello), START_LIMIT_S) is None:
                self._end(process)
                raise InternalError("the process that tries grammars did not start")
        return process

    def _ask(self, process: "subprocess.Popen[str]", line: str, limit_s: float) -> str | None:
        """None when the process dies, of itself or of the limit."""
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(limit_s, process.kill)
        timer.start()
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            return process.stdout.readline() or None
        except (BrokenPipeError, ValueError):  # it is dead, or closed
            return None
        finally:
            timer.cancel()

    def _end(self, process: "subprocess.Popen[str]") -> None:
        with self._lock:
            if self._process is process:
                self._process = None
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()

    def _refusal(self, what: str) -> ServingError:
        return InvalidRequest(f"the grammar {what}: make it smaller", param=GRAMMAR_PARAM, code="invalid_grammar")


# -- the process ------------------------------------------------------------------------------------------------------


def main() -> None:
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hello = json.loads(sys.stdin.readline())
    vocabulary = [bytes.fromhex(text) for text in hello["vocabulary"]]
    compiler = Compiler(lambda: vocabulary, eos_token_ids=hello["eos_token_ids"])
    compiler.warm()
    _say({"ready": True})
    for line in sys.stdin:
        _limit(hello["limit_s"], hello["memory_bytes"])
        try:
            _say({"num_bytes": compiler.compile(GrammarSource.decode(line)).memory_size_bytes})
        except InvalidRequest as error:
            _say({"error": error.message})
        except MemoryError:
            return


def _limit(limit_s: float, memory_bytes: int) -> None:
    """From here on. Beyond the time the kernel kills; beyond the memory allocations fail."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = math.ceil(usage.ru_utime + usage.ru_stime + limit_s)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    data_bytes = int(status["VmData"].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes + memory_bytes, resource.RLIM_INFINITY))


def _say(content: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
