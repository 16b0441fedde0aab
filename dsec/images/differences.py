"""What two images don't have alike: the trees that overlayfs would show, compared entry by entry. From metadata alone: no data is read.

Two files count as alike when type, mode, owner, size, xattrs and target are, and either their data is the same place of the same blob or
their times are equal. So a file whose data alone was changed, with the old time set again, isn't seen; a file that was made anew with the
same content at another time is.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dsec.images.erofs import Entry, entries
from libdsec.schema import ImageChange


@dataclass(frozen=True, slots=True)
class Placed:
    """An entry and the blob that its data lies in."""

    entry: Entry
    blob: str | None


def tree(layers: Sequence[tuple[bytes, str | None]]) -> dict[bytes, Placed]:
    """What is seen through metadata files and the digests of their blobs, lowest first. Raises ImageError."""
    seen: dict[bytes, Placed] = {}
    for image, blob in layers:
        _lay_over(seen, image, blob)
    return seen


def _lay_over(seen: dict[bytes, Placed], image: bytes, blob: str | None) -> None:
    layer = list(entries(image))
    gone = {path for path, entry in layer if _hides(seen, path, entry)}
    if gone:
        for path in [path for path in seen if _below(path, gone)]:
            del seen[path]
    for path, entry in layer:
        if entry.is_whiteout:
            seen.pop(path, None)
        else:
            seen[path] = Placed(entry, blob)


def _hides(seen: dict[bytes, Placed], path: bytes, entry: Entry) -> bool:
    """Whether what lies below ``path`` in lower layers isn't seen any more."""
    lower = seen.get(path)
    return lower is not None and stat.S_ISDIR(lower.entry.mode) and (not stat.S_ISDIR(entry.mode) or entry.is_opaque)


def _below(path: bytes, directories: set[bytes]) -> bool:
    if b"" in directories and path:
        return True
    at = path.find(b"/")
    while at >= 0:
        if path[:at] in directories:
            return True
        at = path.find(b"/", at + 1)
    return False


def changes(before: dict[bytes, Placed], after: dict[bytes, Placed]) -> Iterator[ImageChange]:
    """Sorted by path."""
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path), after.get(path)
        if old is None and new is not None:
            yield ImageChange(path_bytes=path, kind="added", size=new.entry.size)
        elif new is None and old is not None:
            yield ImageChange(path_bytes=path, kind="removed", size=old.entry.size)
        elif old is not None and new is not None and not _alike(old, new):
            yield ImageChange(path_bytes=path, kind="changed", size=new.entry.size, size_before=old.entry.size)


def _alike(old: Placed, new: Placed) -> bool:
    a, b = old.entry, new.entry
    if (a.mode, a.uid, a.gid, a.size, a.rdev, a.target) != (b.mode, b.uid, b.gid, b.size, b.rdev, b.target):
        return False
    if _own_xattrs(a) != _own_xattrs(b):
        return False
    same_data = old.blob == new.blob and a.blocks == b.blocks
    return not stat.S_ISREG(a.mode) or same_data or a.mtime_ns == b.mtime_ns


def _own_xattrs(entry: Entry) -> tuple[tuple[bytes, bytes], ...]:
    return tuple(pair for pair in entry.xattrs if not pair[0].startswith(b"trusted.overlay."))
