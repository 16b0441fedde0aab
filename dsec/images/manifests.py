"""What OCI layouts, docker archives and registries say about images: read strictly, to the point where only layers are left to convert.

Specifications: OCI image-spec 1.1 (image-layout, image index, image manifest, image configuration), Docker image specification v1.2.
Every document and layer must have the digest and the size under which it is referred to; what has an unknown media type is refused by name.
"""

from __future__ import annotations

import hashlib
import itertools
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO, Literal, TypeVar

import msgspec

from dsec.images.documents import decode
from dsec.images.limits import ImportLimits
from dsec.images.members import Member, Members, headers
from dsec.images.streams import Compression
from libdsec.errors import ImageError
from libdsec.schema import ImageConfig

Format = Literal["tar", "docker-archive", "oci-archive"]

INDEXES = {"application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json"}
MANIFESTS = {"application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json"}
_CONFIGS = {"application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json"}
_LAYERS: dict[str, Compression] = {
    "application/vnd.oci.image.layer.v1.tar": "none",
    "application/vnd.oci.image.layer.v1.tar+gzip": "gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd": "zstd",
    "application/vnd.docker.image.rootfs.diff.tar": "none",
    "application/vnd.docker.image.rootfs.diff.tar.gzip": "gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd": "zstd",
}
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "riscv64": "riscv64", "ppc64le": "ppc64le", "s390x": "s390x"}
_ATTESTATION = "vnd.docker.reference.type"
INDEX_DEPTH = 4
"""Indexes in indexes that are followed."""
ENDLESS = "the index leads to indexes without end"
_PEEK_MEMBERS = 5_000
"""Headers looked at to tell an image archive from a root filesystem: image archives have a few per layer."""
_DIRECTORY = b"5"
"""The type of a directory's entry in a tar."""

T = TypeVar("T")


class _Platform(msgspec.Struct):
    architecture: str = ""
    os: str = ""


class Descriptor(msgspec.Struct, rename="camel"):
    """What a document or a layer is referred to by. ``size`` is in bytes."""

    digest: str
    size: int
    media_type: str = ""
    platform: _Platform | None = None
    annotations: dict[str, str] | None = None


class _Layout(msgspec.Struct, rename="camel"):
    image_layout_version: str


class Index(msgspec.Struct, rename="camel"):
    """An OCI image index, or a docker manifest list."""

    manifests: list[Descriptor]


class Manifest(msgspec.Struct, rename="camel"):
    """An OCI image manifest, or a docker one of schema 2."""

    config: Descriptor
    layers: list[Descriptor]


_ABSENT = msgspec.Raw(b"null")


class _Shape(msgspec.Struct, rename="camel"):
    """What tells an index from a manifest."""

    media_type: str = ""
    manifests: msgspec.Raw = _ABSENT
    layers: msgspec.Raw = _ABSENT
    config: msgspec.Raw = _ABSENT


class _RootFs(msgspec.Struct):
    type: str = "layers"
    diff_ids: list[str] = []


class _RunConfig(msgspec.Struct):
    """The member ``config`` of an image configuration; null stands for absent everywhere."""

    Env: list[str] | None = None
    User: str | None = None
    WorkingDir: str | None = None
    Entrypoint: list[str] | None = None
    Cmd: list[str] | None = None
    Labels: dict[str, str] | None = None


class _Config(msgspec.Struct):
    rootfs: _RootFs
    os: str = ""
    architecture: str = ""
    config: _RunConfig | None = None


class _DockerImage(msgspec.Struct):
    """One entry of ``manifest.json`` in a docker archive."""

    Config: str
    Layers: list[str]


@dataclass(frozen=True)
class LayerSource:
    """One layer's archive inside the outer one."""

    member: Member
    diff_id: str
    """Digest of the decompressed archive, as the configuration promises it."""
    digest: str | None
    """Digest of the member itself, where the manifest promises one."""
    compression: Compression | None
    """None: find out by the first bytes."""


@dataclass(frozen=True)
class RemoteLayer:
    """One layer of an image in a registry."""

    digest: str
    """Digest of the layer as the registry has it."""
    size: int
    """Its bytes there."""
    diff_id: str
    """Digest of the decompressed archive, as the configuration promises it."""
    compression: Compression


@dataclass(frozen=True)
class ImageSource:
    """An image inside an archive: its layers, lowest first, and what is honoured of its configuration."""

    layers: tuple[LayerSource, ...]
    config: ImageConfig


def detect_format(archive: BinaryIO, limits: ImportLimits) -> Format:
    """What an uncompressed archive is, by its top-level names, and where these leave it open by its ``manifest.json``. Judges nothing:
    whoever reads it next says what is wrong with it."""
    top = set()
    files: dict[str, Member] = {}
    try:
        for name, kind, _, member in itertools.islice(headers(archive), _PEEK_MEMBERS):
            parts = [part for part in name.split("/") if part not in ("", ".")]
            top.add(parts[0] if parts else "")
            if kind != _DIRECTORY:
                files["/".join(parts)] = member
    except ImageError:
        pass
    if {"oci-layout", "index.json"} <= top:
        return "oci-archive"
    if "manifest.json" in top and any(map(_holds_layers, top)):
        return "docker-archive"
    return "docker-archive" if _describes_images(archive, files, limits) else "tar"


def _holds_layers(name: str) -> bool:
    """Whether a ``docker save`` keeps layers under this top-level name: ``blobs``, or what is called by a sha256."""
    return name == "blobs" or (len(name) == 64 and all(letter in "0123456789abcdef" for letter in name))


def _describes_images(archive: BinaryIO, files: Mapping[str, Member], limits: ImportLimits) -> bool:
    """Whether ``manifest.json`` is a docker archive's, and all that it names is there. go-containerregistry's tarball package (crane, ko,
    kaniko) has configuration and layers in the root, as ``sha256:<hex>`` and ``<hex>.tar.gz``; a root filesystem may have a
    ``manifest.json`` of its own."""
    manifest = files.get("manifest.json")
    if manifest is None or manifest.size > limits.document:
        return False
    archive.seek(manifest.offset)
    try:
        images = decode(archive.read(manifest.size), list[_DockerImage])
    except msgspec.DecodeError:
        return False
    return bool(images) and all(image.Layers and {image.Config, *image.Layers} <= files.keys() for image in images)


def read_oci_archive(archive: BinaryIO, limits: ImportLimits) -> ImageSource:
    """The one image in an OCI layout. Raises ImageError."""
    documents = _Documents(archive, Members.read(archive, limits.members), limits)
    layout = documents.decode("oci-layout", _Layout)
    if layout.image_layout_version != "1.0.0":
        raise ImageError(f"unknown version of the OCI layout: {layout.image_layout_version!r}")
    index = documents.decode("index.json", Index)
    descriptor = choose(index, "the archive")
    for _ in range(INDEX_DEPTH):
        if descriptor.media_type in MANIFESTS:
            break
        descriptor = choose(documents.decode_blob(descriptor, Index), "the archive")
    else:
        raise ImageError(ENDLESS)
    manifest = documents.decode_blob(descriptor, Manifest)
    check_config_type(manifest)
    config = documents.decode_blob(manifest.config, _Config)
    _check_config(config, len(manifest.layers), limits)
    layers = [
        LayerSource(documents.blob(layer), diff_id, layer.digest, _layer_compression(layer))
        for layer, diff_id in zip(manifest.layers, config.rootfs.diff_ids, strict=True)
    ]
    return ImageSource(tuple(layers), _honoured(config))


def parse_index_or_manifest(data: bytes, media_type: str, name: str) -> Index | Manifest:
    """What a registry gave as a manifest. ``media_type`` is what it says that it is. Raises ImageError, also for what can be read as both
    (CVE-2021-41190) and for what gives itself another type than the registry does."""
    shape = _decode(name, data, _Shape)
    stated = shape.media_type or media_type
    if media_type in INDEXES | MANIFESTS and stated != media_type:
        raise ImageError(f"{name} calls itself {stated[:100]!r}, the registry calls it {media_type!r}")
    if stated in INDEXES and shape.layers == _ABSENT and shape.config == _ABSENT:
        return _decode(name, data, Index)
    if stated in MANIFESTS and shape.manifests == _ABSENT:
        return _decode(name, data, Manifest)
    if stated in INDEXES | MANIFESTS:
        raise ImageError(f"{name} is an index and a manifest at the same time")
    raise ImageError(f"{name} has the media type {stated[:100]!r}, which isn't supported: push the image anew with a current tool")


def remote_image(manifest: Manifest, config: bytes, limits: ImportLimits) -> tuple[tuple[RemoteLayer, ...], ImageConfig]:
    """The layers of an image in a registry, lowest first, and what is honoured of its configuration, whose digest the caller has checked.
    Raises ImageError."""
    decoded = _decode(manifest.config.digest, config, _Config)
    _check_config(decoded, len(manifest.layers), limits)
    layers = []
    for layer, diff_id in zip(manifest.layers, decoded.rootfs.diff_ids, strict=True):
        check_descriptor(layer)
        layers.append(RemoteLayer(layer.digest, layer.size, diff_id, _layer_compression(layer)))
    return tuple(layers), _honoured(decoded)


def check_config_type(manifest: Manifest) -> None:
    """Raises ImageError for a manifest of something that is no image (a chart, a signature, a model)."""
    if manifest.config.media_type not in _CONFIGS:
        raise ImageError(f"the configuration has the media type {manifest.config.media_type[:100]!r}, which isn't supported")


def check_descriptor(descriptor: Descriptor) -> None:
    """Raises ImageError for a digest or a size that can't be."""
    check_digest(descriptor.digest)
    if descriptor.size < 0:
        raise ImageError(f"{descriptor.digest} is said to have {descriptor.size} bytes")


def _layer_compression(layer: Descriptor) -> Compression:
    compression = _LAYERS.get(layer.media_type)
    if compression is None:
        raise ImageError(f"a layer has the media type {layer.media_type[:100]!r}, which isn't supported")
    return compression


def read_docker_archive(archive: BinaryIO, limits: ImportLimits) -> ImageSource:
    """The one image in a docker archive: what ``docker save`` writes, or go-containerregistry. Raises ImageError."""
    members = Members.read(archive, limits.members)
    documents = _Documents(archive, members, limits)
    images = documents.decode("manifest.json", list[_DockerImage])
    if len({image.Config for image in images}) != 1:
        raise ImageError(f"the archive holds {len(images)} images: save one at a time")
    image = images[0]
    config = documents.decode_named(image.Config, _Config)
    _check_config(config, len(image.Layers), limits)
    layers = [
        LayerSource(members.get(name), diff_id, None, None) for name, diff_id in zip(image.Layers, config.rootfs.diff_ids, strict=True)
    ]
    return ImageSource(tuple(layers), _honoured(config))


class _Documents:
    """JSON documents in an archive: bounded, checked, decoded."""

    def __init__(self, archive: BinaryIO, members: Members, limits: ImportLimits) -> None:
        self._archive = archive
        self._members = members
        self._limits = limits

    def decode(self, name: str, kind: type[T]) -> T:
        return _decode(name, self._read(name, self._members.get(name)), kind)

    def decode_named(self, name: str, kind: type[T]) -> T:
        """A document whose file name is its digest, as docker (``<hex>.json``) and go-containerregistry (``sha256:<hex>``) name
        configurations."""
        data = self._read(name, self._members.get(name))
        if hashlib.sha256(data).hexdigest() != name.rsplit("/", 1)[-1].removeprefix("sha256:").removesuffix(".json"):
            raise ImageError(f"the content of {name!r} has another digest")
        return _decode(name, data, kind)

    def decode_blob(self, descriptor: Descriptor, kind: type[T]) -> T:
        data = self._read(descriptor.digest, self.blob(descriptor))
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != descriptor.digest:
            raise ImageError(f"the content of {descriptor.digest} has another digest")
        return _decode(descriptor.digest, data, kind)

    def blob(self, descriptor: Descriptor) -> Member:
        """Where the blob lies; its size is checked, its digest not yet."""
        check_digest(descriptor.digest)
        member = self._members.get(f"blobs/sha256/{descriptor.digest.removeprefix('sha256:')}")
        if member.size != descriptor.size:
            raise ImageError(f"{descriptor.digest} has {member.size} bytes, {descriptor.size} are promised")
        return member

    def _read(self, name: str, member: Member) -> bytes:
        if member.size > self._limits.document:
            raise ImageError(f"{name!r} has {member.size} bytes, at most {self._limits.document} are allowed")
        self._archive.seek(member.offset)
        return self._archive.read(member.size)


def _decode(name: str, data: bytes, kind: type[T]) -> T:
    try:
        return decode(data, kind)
    except msgspec.DecodeError as error:
        raise ImageError(f"{name!r} is not what it should be: {error}") from error


def check_digest(digest: str) -> None:
    """Raises ImageError for anything but a sha256 in lower-case hexadecimal."""
    algorithm, _, value = digest.partition(":")
    if algorithm != "sha256" or len(value) != 64 or any(letter not in "0123456789abcdef" for letter in value):
        raise ImageError(f"the digest {digest[:100]!r} isn't supported: sha256 is")


def choose(index: Index, where: str) -> Descriptor:
    """The entry of an index that is for this machine: a manifest or another index. Signatures, attestations and other platforms are passed
    over; of several variants of the same architecture the first is taken, which is the order of preference that builders write.

    Raises ImageError where none is left, and where several images without a platform are. ``where`` names the source in the message.
    """
    here = _ARCHITECTURES.get(platform.machine(), platform.machine())
    candidates: dict[str, Descriptor] = {}
    foreign = ""
    for descriptor in index.manifests:
        wanted = descriptor.platform
        if _ATTESTATION in (descriptor.annotations or {}):
            continue
        if wanted is not None and (wanted.os not in ("", "linux") or wanted.architecture not in ("", here)):
            continue
        if descriptor.media_type not in MANIFESTS | INDEXES:
            foreign = foreign or descriptor.media_type
            continue
        check_descriptor(descriptor)
        candidates.setdefault(descriptor.digest, descriptor)
    if not candidates and foreign:
        raise ImageError(f"the index holds the media type {foreign[:100]!r}, which isn't supported")
    if not candidates:
        raise ImageError(f"{where} holds no image for linux/{here}")
    named = [each for each in candidates.values() if each.platform is not None and each.platform.architecture]
    if len(candidates) > 1 and not named:
        raise ImageError(f"{where} holds {len(candidates)} images: save one at a time")
    return named[0] if named else next(iter(candidates.values()))


def _check_config(config: _Config, layers: int, limits: ImportLimits) -> None:
    here = _ARCHITECTURES.get(platform.machine(), platform.machine())
    if config.os not in ("", "linux"):
        raise ImageError(f"the image is for {config.os!r}, not for Linux")
    if config.architecture not in ("", here):
        raise ImageError(f"the image is for the architecture {config.architecture!r}, this machine is {here}")
    if config.rootfs.type != "layers":
        raise ImageError(f"the root filesystem is of the type {config.rootfs.type!r}, which isn't supported")
    if len(config.rootfs.diff_ids) != layers:
        raise ImageError(f"the manifest lists {layers} layers, the configuration {len(config.rootfs.diff_ids)}")
    if not 0 < layers <= limits.layers:
        raise ImageError(f"the image has {layers} layers, 1 to {limits.layers} are allowed")
    for diff_id in config.rootfs.diff_ids:
        check_digest(diff_id)


def _honoured(config: _Config) -> ImageConfig:
    run = config.config or _RunConfig()
    env = {}
    for setting in run.Env or ():
        name, _, value = setting.partition("=")
        if not name or "\0" in setting:
            raise ImageError(f"the configuration sets the variable {setting[:100]!r}")
        env[name] = value
    for text in (run.User, run.WorkingDir, *(run.Entrypoint or ()), *(run.Cmd or ())):
        if text is not None and "\0" in text:
            raise ImageError("the configuration holds a text with a NUL")
    workdir = run.WorkingDir or None
    return ImageConfig(
        env=env,
        user=run.User or None,
        workdir=workdir if workdir is None or workdir.startswith("/") else f"/{workdir}",
        entrypoint=None if run.Entrypoint is None else tuple(run.Entrypoint),
        cmd=None if run.Cmd is None else tuple(run.Cmd),
        labels=run.Labels or {},
    )
