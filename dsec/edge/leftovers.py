"""What work in a sandbox leaves behind and no image needs: the globs that packing keeps out unless told otherwise. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from libdsec.errors import InvalidArgument
from libdsec.schema import Leftover

LEFTOVERS = (
    # Histories of shells and prompts (bash, zsh, python, node, psql, mysql, sqlite, less).
    "~/.*_history",
    "~/.lesshst",
    # Debian, Red Hat, Alpine: packages that were installed from, and lists that are fetched anew.
    "/var/cache/apt/archives/**",
    "/var/cache/apt/*.bin",
    "/var/lib/apt/lists/**",
    "/var/cache/dnf/**",
    "/var/cache/yum/**",
    "/var/cache/apk/**",
    # Python and JavaScript.
    "~/.cache/pip",
    "~/.cache/uv",
    "~/.npm/_cacache",
    "~/.npm/_logs",
    "~/.cache/yarn",
)
GLOBS_MAX = 200
"""That a request may give: with each home directory's two and ours they stay below the 512 of dsec-mklayer."""
GLOB_MAX = 900
"""Characters of one, so that it stays below the 1,024 bytes of dsec-mklayer with a home directory before it."""
HOMES = ("/root/", "/home/*/")


class Exclusion:
    """The globs of one pack, as dsec-mklayer takes them, and as whoever gave them wants to be told of them."""

    def __init__(self, exclude: Sequence[str], *, leftovers: bool) -> None:
        """``exclude`` are a request's own globs. Raises InvalidArgument."""
        if len(exclude) > GLOBS_MAX:
            raise InvalidArgument(f"{len(exclude)} globs; {GLOBS_MAX} are possible", field="exclude")
        for glob in exclude:
            if not glob.strip("/") or "\0" in glob or len(glob.encode("utf-8", "replace")) > GLOB_MAX:
                raise InvalidArgument(f"exclude has {glob[:80]!r}: a glob of 1 to {GLOB_MAX} bytes without NUL is needed", field="exclude")
        self._given = (*exclude, *(LEFTOVERS if leftovers else ()))
        expanded = [(absolute, glob) for glob in self._given for absolute in _in_homes(glob)]
        self.globs = tuple(absolute for absolute, _ in expanded)
        """For dsec-mklayer."""
        self._origins = tuple(glob for _, glob in expanded)

    def told(self, counts: Sequence[tuple[int, int]]) -> tuple[Leftover, ...]:
        """What was kept out, glob by glob, from the entries and bytes of each of :attr:`globs`."""
        sums = dict.fromkeys(self._given, (0, 0))
        for glob, (entries, size) in zip(self._origins, counts, strict=True):
            sums[glob] = (sums[glob][0] + entries, sums[glob][1] + size)
        return tuple(Leftover(glob=glob, entries=entries, bytes=size) for glob, (entries, size) in sums.items() if entries)


def _in_homes(glob: str) -> tuple[str, ...]:
    if not glob.startswith("~/"):
        return (glob,)
    return tuple(home + glob[2:] for home in HOMES)
