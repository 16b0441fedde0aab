"""Archives for the tests of the image store: tars from short descriptions, and image archives around them, whole or broken on purpose."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsec.images.converter import find_program

OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]


def member(name: str | bytes, kind: bytes = tarfile.REGTYPE, **attributes: object) -> tarfile.TarInfo:
    """A tar entry; ``attributes`` are TarInfo's."""
    info = tarfile.TarInfo(name if isinstance(name, str) else name.decode("utf-8", "surrogateescape"))
    info.type = kind
    info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    for attribute, value in attributes.items():
        setattr(info, attribute, value)
    return info


def tar(entries: Sequence[tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]], *, format: int = tarfile.PAX_FORMAT) -> bytes:
    """An archive of entries, some with content."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=format, encoding="utf-8", errors="surrogateescape") as archive:
        for entry in entries:
            info, content = entry if isinstance(entry, tuple) else (entry, b"")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return made.getvalue()


def files(contents: Mapping[str, bytes]) -> bytes:
    """A tar of plain files."""
    return tar([(member(name), content) for name, content in contents.items()])


def check_passes(meta: Path, report: Mapping[str, object]) -> None:
    """Sees to it that another node would take the metadata, for the layer that was reported when it was made."""
    done = subprocess.run([str(find_program()), "--check", str(meta)], capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    facts = ("meta", "meta_bytes", "blob", "blob_bytes", "extra_ids", "inodes")
    checked = json.loads(done.stdout)
    assert {fact: checked[fact] for fact in facts} == {fact: report[fact] for fact in facts}


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def descriptor(data: bytes, media_type: str) -> dict[str, object]:
    return {"mediaType": media_type, "digest": digest(data), "size": len(data)}


@dataclass
class OciImage:
    """An OCI layout in the making. Every part can be bent before ``archive`` puts them together."""

    layers: list[bytes]
    """As stored, compressed or not."""
    media_types: list[str] = field(default_factory=list)
    config: dict[str, object] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    extra: list[tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]] = field(default_factory=list)

    @classmethod
    def of(cls, layers: Sequence[bytes], *, compress: bool = False, run: Mapping[str, object] | None = None) -> OciImage:
        image = cls([gzip.compress(layer, 1, mtime=0) if compress else layer for layer in layers])
        image.media_types = [OCI_LAYER + ("+gzip" if compress else "")] * len(layers)
        image.config = {
            "os": "linux",
            "architecture": ARCHITECTURE,
            "config": dict(run or {}),
            "rootfs": {"type": "layers", "diff_ids": [digest(layer) for layer in layers]},
        }
        return image

    def archive(self) -> bytes:
        """The layout as a tar."""
        config = json.dumps(self.config).encode()
        layers = [descriptor(data, kind) for data, kind in zip(self.layers, self.media_types, strict=True)]
        manifest = json.dumps({"schemaVersion": 2, "config": descriptor(config, OCI_CONFIG), "layers": layers}).encode()
        index = {"schemaVersion": 2, "manifests": [descriptor(manifest, OCI_MANIFEST)]}
        blobs = {digest(data): data for data in (config, manifest, *self.layers)} | self.blobs
        entries: list[tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]] = [
            (member("oci-layout"), b'{"imageLayoutVersion": "1.0.0"}'),
            (member("index.json"), json.dumps(index).encode()),
            member("blobs", tarfile.DIRTYPE),
        ]
        entries += [(member(f"blobs/sha256/{name.removeprefix('sha256:')}"), data) for name, data in blobs.items()]
        return tar([*entries, *self.extra])


def docker_archive(layers: Sequence[bytes], run: Mapping[str, object] | None = None, *, images: int = 1) -> bytes:
    """What ``docker save`` of old writes: a directory per layer; a layer that occurs again is a symlink."""
    entries: list[tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]] = []
    names: list[str] = []
    seen: dict[str, str] = {}
    for position, layer in enumerate(layers):
        name = hashlib.sha256(f"{position}".encode()).hexdigest()
        entries.append(member(name, tarfile.DIRTYPE))
        if digest(layer) in seen:
            entries.append(member(f"{name}/layer.tar", tarfile.SYMTYPE, linkname=f"../{seen[digest(layer)]}/layer.tar"))
        else:
            entries.append((member(f"{name}/layer.tar"), layer))
            seen[digest(layer)] = name
        names.append(f"{name}/layer.tar")
    manifest = []
    for number in range(images):
        config = json.dumps(
            {"config": dict(run or {}), "n": number, "rootfs": {"type": "layers", "diff_ids": [digest(layer) for layer in layers]}}
        ).encode()
        name = f"{digest(config).removeprefix('sha256:')}.json"
        entries.append((member(name), config))
        manifest.append({"Config": name, "RepoTags": ["x:latest"], "Layers": names})
    return tar([*entries, (member("manifest.json"), json.dumps(manifest).encode())])


def flat_docker_archive(layers: Sequence[bytes], run: Mapping[str, object] | None = None, *, compress: bool = True) -> bytes:
    """What go-containerregistry's tarball package writes (crane, kaniko, ko): all in the root, a layer that occurs again only once."""
    config = json.dumps({"config": dict(run or {}), "rootfs": {"type": "layers", "diff_ids": [digest(layer) for layer in layers]}}).encode()
    stored = [gzip.compress(layer, 1, mtime=0) if compress else layer for layer in layers]
    names = [f"{digest(data).removeprefix('sha256:')}.tar{'.gz' if compress else ''}" for data in stored]
    manifest = [{"Config": digest(config), "RepoTags": ["x:latest"], "Layers": names}]
    contents = {digest(config): config, **dict(zip(names, stored, strict=True)), "manifest.json": json.dumps(manifest).encode()}
    return files(contents)
