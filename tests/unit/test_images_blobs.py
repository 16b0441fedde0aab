"""The directory of blobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.images.blobs import BlobDirectory

DIGEST = "sha256:" + "b" * 64


@pytest.fixture
def blobs(tmp_path: Path) -> BlobDirectory:
    directory = BlobDirectory(tmp_path / "images", disk_reserve=0)
    directory.open()
    return directory


def test_what_is_held_has_two_names_and_is_a_blob_once_it_is_adopted(blobs: BlobDirectory, tmp_path: Path) -> None:
    file = tmp_path / "chunks"
    file.write_bytes(b"content")
    held = blobs.hold(file)
    assert file.stat().st_nlink == 2 and not blobs.has(DIGEST)
    blobs.adopt(held, DIGEST)
    blobs.remove_workspace(held.parent)
    assert blobs.path(DIGEST).samefile(file) and file.stat().st_nlink == 2


def test_what_is_held_and_not_adopted_leaves_nothing(blobs: BlobDirectory, tmp_path: Path) -> None:
    file = tmp_path / "chunks"
    file.write_bytes(b"content")
    blobs.remove_workspace(blobs.hold(file).parent)
    with pytest.raises(FileNotFoundError):
        blobs.hold(tmp_path / "nothing")
    assert file.stat().st_nlink == 1 and not blobs.has(DIGEST)
    assert list((tmp_path / "images" / "tmp").iterdir()) == []
