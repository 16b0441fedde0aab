"""The images of the cold benchmarks: eight real toolchains from Debian packages, each 400 MB to 1 GB unpacked, made once and kept.

Each has a workload: something small that a rollout's first command might be. It reads what such a command reads and no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.rootfs import CACHE
from dsec.demo.environment import debian_tar


@dataclass(frozen=True)
class Toolchain:
    """A Debian root filesystem with some packages, and what is run in it."""

    name: str
    packages: tuple[str, ...]
    workload: str
    """A shell command that exits 0."""

    async def tar(self) -> Path:
        """The root filesystem; made if it isn't there (a minute). Raises DebianRootError."""
        return await debian_tar(CACHE, self.packages)


_C = "int add(int a, int b) { return a + b; }"
_GO = "package p\\nfunc F(a int) int { return a + 1 }\\n"
_RUST = "pub fn f(a: i32) -> i32 { a + 1 }"

TOOLCHAINS = (
    Toolchain("python", ("python3-minimal", "python3-numpy", "python3-scipy", "python3-pandas"), "python3 -c 'import numpy, sqlite3'"),
    Toolchain("gcc", ("build-essential", "gdb", "cmake", "git"), f"cd /tmp && echo '{_C}' > a.c && gcc -O2 -c a.c"),
    Toolchain("go", ("golang-go", "git"), f"cd /tmp && printf '{_GO}' > a.go && go tool compile -p p a.go"),
    Toolchain("java", ("openjdk-17-jdk-headless", "maven"), "java -Xshare:auto --list-modules"),
    Toolchain("node", ("nodejs", "npm"), 'node -e \'require("http"); require("zlib")\''),
    Toolchain("clang", ("clang", "lld", "ninja-build"), f"cd /tmp && echo '{_C}' > a.c && clang -O1 -c a.c"),
    Toolchain("rust", ("rustc", "cargo"), f"cd /tmp && echo '{_RUST}' > a.rs && rustc --crate-type lib --emit metadata a.rs"),
    Toolchain("r", ("r-base-core", "r-recommended", "r-base-dev"), "Rscript -e 'library(stats); median(c(1, 2, 3))'"),
)
