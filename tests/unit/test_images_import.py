"""The image store: imports of every kind, what is refused, and that nothing half made stays."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import lzma
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import zstandard

from dsec.images import ImageStore, ImportLimits, erofs
from dsec.images.blobs import hex_of
from dsec.images.catalog import Caller
from dsec.images.importing import ImportRequest
from dsec.store import Store
from libdsec.errors import Conflict, DSecError, ImageError, ImageNotFound, InvalidArgument, NoCapacity, PermissionDenied
from libdsec.schema import ImageFinding, ImageInfo, ImportLine
from tests.unit.images_archives import OCI_LAYER, OciImage, digest, docker_archive, files, flat_docker_archive, member, tar

ADMIN = Caller(project="root", admin=True)
DEADLINE_S = 30.0

Import = Callable[..., Awaitable[ImageInfo]]


async def chunks(data: bytes, size: int = 50_000) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def request(name: str = "image", **more: object) -> ImportRequest:
    settings: dict[str, object] = {"kind": "base", "format": None, "at": "/", "caller": ADMIN, "idempotency_key": None, **more}
    return ImportRequest(name=name, **settings)  # type: ignore[arg-type]


def left_behind(root: Path) -> list[str]:
    """Everything below the store's directory but the two directories that are always there."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.name not in ("tmp", "blobs"))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = await Store.open_file(tmp_path / "store.sqlite")
    yield opened
    await opened.close()


@pytest.fixture
async def images(tmp_path: Path, store: Store) -> ImageStore:
    opened = ImageStore(tmp_path / "images", store, limits=ImportLimits(disk_reserve=0))
    await opened.open()
    return opened


async def load(
    images: ImageStore, data: bytes, name: str = "image", tell: Callable[[ImportLine], None] | None = None, **more: object
) -> ImageInfo:
    return await images.import_archive(request(name, **more), chunks(data), tell or (lambda line: None))


# -- what is taken -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pack",
    [
        lambda data: data,
        gzip.compress,
        lambda data: gzip.compress(data[:700]) + gzip.compress(data[700:]) + bytes(512),
        zstandard.compress,
        lambda data: zstandard.compress(data[:700]) + zstandard.compress(data[700:]),
        lambda data: lzma.compress(data, format=lzma.FORMAT_XZ),
    ],
    ids=["plain", "gzip", "gzip in two members", "zstd", "zstd in two frames", "xz"],
)
async def test_a_tar_gives_the_same_layer_however_it_is_compressed(images: ImageStore, pack: Callable[[bytes], bytes]) -> None:
    archive = files({"etc/hostname": b"box\n", "bin/tool": b"x" * 100_000})
    plain = await load(images, archive)
    packed = await load(images, pack(archive))
    assert packed.layers == plain.layers
    assert (plain.version, packed.version) == (1, 2)


async def test_a_workspace_is_placed_below_its_path(images: ImageStore, tmp_path: Path) -> None:
    below = await load(images, files({"f": b"1"}), kind="workspace", at="/srv/work")
    written_out = await load(images, files({"srv/work/f": b"1"}), kind="workspace")
    assert below.layers[0].blob == written_out.layers[0].blob
    assert below.layers[0].digest == written_out.layers[0].digest


async def test_an_oci_archive_is_verified_and_its_configuration_honoured(images: ImageStore) -> None:
    run = {
        "Env": ["PATH=/usr/bin:/bin", "EMPTY=", "X=a=b"],
        "User": "1000:1000",
        "WorkingDir": "/work",
        "Entrypoint": ["/entry"],
        "Cmd": None,
        "Labels": {"k": "v"},
    }
    image = OciImage.of([files({"a": b"1"}), files({"b": b"2"})], compress=True, run=run)
    config = (await load(images, image.archive())).config
    assert config.env == {"PATH": "/usr/bin:/bin", "EMPTY": "", "X": "a=b"}
    assert (config.user, config.workdir, config.entrypoint, config.cmd) == ("1000:1000", "/work", ("/entry",), None)
    assert config.labels == {"k": "v"}


async def test_a_docker_archive_with_a_repeated_layer_is_read(images: ImageStore) -> None:
    layer = files({"a": b"1"})
    info = await load(images, docker_archive([layer, files({"b": b"2"}), layer], {"Env": ["A=1"]}))
    assert info.config.env == {"A": "1"}
    assert len(info.layers) == 1


@pytest.mark.parametrize("compress", [True, False])
async def test_a_docker_archive_with_all_in_its_root_is_read_as_one(images: ImageStore, compress: bool) -> None:
    layer = files({"a": b"1"})
    layers = [layer, files({"b": b"2"}), layer]
    saved = await load(images, docker_archive(layers, {"Env": ["A=1"]}))
    flat = await load(images, flat_docker_archive(layers, {"Env": ["A=1"]}, compress=compress))
    assert (flat.config, flat.layers) == (saved.config, saved.layers)


@pytest.mark.parametrize(
    "manifest",
    [
        b"{",
        b'{"name": "app"}',
        b"[]",
        b'[{"Config": "app.js", "Layers": []}]',
        b'[{"Config": "app.js", "Layers": ["lib"]}]',
        b'[{"Config": "app.js", "Layers": ["gone.tar"]}]',
        b'[{"Config": "app.js", "Layers": ["lib/a.js"]}]' + b" " * ImportLimits().document,
    ],
)
async def test_a_root_filesystem_with_a_manifest_of_its_own_stays_a_tar(images: ImageStore, manifest: bytes) -> None:
    tree = tar([(member("manifest.json"), manifest), (member("app.js"), b"1"), member("lib", tarfile.DIRTYPE), (member("lib/a.js"), b"2")])
    assert (await load(images, tree)).layers == (await load(images, tree, format="tar")).layers


async def test_adjacent_layers_are_collapsed_up_to_the_limit(tmp_path: Path, store: Store) -> None:
    layers = [files({f"f{index}": b"x" * 20_000}) for index in range(5)]
    size = len(layers[0])
    images = ImageStore(tmp_path / "images", store, limits=ImportLimits(disk_reserve=0, collapse=2 * size))
    await images.open()
    assert len((await load(images, OciImage.of(layers).archive())).layers) == 3


async def test_hard_links_lead_into_layers_that_are_not_collapsed_with_theirs(tmp_path: Path, store: Store) -> None:
    data = b"x" * 20_000
    linking = tar([member("b", tarfile.LNKTYPE, linkname="a"), (member("filler"), bytes(reversed(range(200))) * 100)])
    layers = [files({"a": data}), linking, tar([member("c", tarfile.LNKTYPE, linkname="b"), (member("more"), data)])]
    images = ImageStore(tmp_path / "images", store, limits=ImportLimits(disk_reserve=0, collapse=len(layers[0])))
    await images.open()
    first = await load(images, OciImage.of(layers).archive())
    assert len(first.layers) == 3
    again = await load(images, OciImage.of(layers).archive(), name="again")
    assert again.digest == first.digest
    # The same archives on another layer are other layers: what they link to is that one's.
    other = await load(images, OciImage.of([files({"a": b"y" * 20_000}), *layers[1:]]).archive(), name="other")
    assert not {layer.digest for layer in first.layers} & {layer.digest for layer in other.layers}
    with pytest.raises(ImageError, match="neither in the archive nor below"):
        await load(images, OciImage.of(layers[1:]).archive(), name="without")


async def test_the_same_layers_in_any_archive_are_the_same_image(images: ImageStore) -> None:
    layers = [files({"a": b"1"}), tar([member(".wh.a"), member("d", tarfile.DIRTYPE)])]
    made = [
        await load(images, data)
        for data in (OciImage.of(layers).archive(), OciImage.of(layers, compress=True).archive(), docker_archive(layers))
    ]
    assert len({info.digest for info in made}) == 1


async def test_attestations_and_other_platforms_are_passed_over(images: ImageStore) -> None:
    archive = bytearray(OciImage.of([files({"a": b"1"})]).archive())
    index_at = archive.index(b'{"schemaVersion": 2, "manifests"')
    index = json.loads(archive[index_at : archive.index(b"\0", index_at)])
    (main,) = index["manifests"]
    other = {**main, "digest": digest(b"x"), "platform": {"os": "linux", "architecture": "mips"}}
    attestation = {**main, "digest": digest(b"y"), "annotations": {"vnd.docker.reference.type": "attestation-manifest"}}
    image = OciImage.of([files({"a": b"1"})])
    rebuilt = rebuild(image.archive(), {"index.json": json.dumps({"manifests": [other, main, attestation]}).encode()})
    assert (await load(images, rebuilt)).version == 1


def rebuild(archive: bytes, replaced: dict[str, bytes | None]) -> bytes:
    """The archive with some members' content replaced, or (None) left out."""
    entries: list[tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]] = []
    with tarfile.open(fileobj=io.BytesIO(archive)) as source:
        for info in source:
            content = source.extractfile(info)
            data = replaced.get(info.name, content.read() if content else b"")
            if data is not None:
                entries.append((info, data))
    return tar(entries)


async def test_the_same_input_is_converted_once_however_many_ask(images: ImageStore) -> None:
    archive = files({"a": b"x" * 300_000})
    steps: list[str | None] = []
    tell = lambda line: steps.append(line.step)  # noqa: E731
    made = await asyncio.gather(*(load(images, archive, name=f"n{index}", tell=tell) for index in range(6)))
    assert steps.count("converting") == 1
    assert len({info.digest for info in made}) == 1
    await load(images, archive, name="later", tell=tell)
    assert steps.count("converting") == 1


# -- what is refused whole -----------------------------------------------------------------------------------------------------------------


def bent(change: Callable[[OciImage], None]) -> bytes:
    image = OciImage.of([files({"a": b"1"}), files({"b": b"2"})])
    change(image)
    return image.archive()


def forge_blob(image: OciImage) -> None:
    image.blobs[digest(image.layers[0])] = image.layers[0].replace(b"1", b"3", 1)


def grow_blob(image: OciImage) -> None:
    image.blobs[digest(image.layers[0])] = image.layers[0] + bytes(512)


def forge_diff_id(image: OciImage) -> None:
    image.config["rootfs"] = {"type": "layers", "diff_ids": [digest(b"other"), digest(image.layers[1])]}


def set_config(**settings: object) -> Callable[[OciImage], None]:
    return lambda image: image.config.update(settings)


def set_media_type(kind: str) -> Callable[[OciImage], None]:
    return lambda image: image.media_types.__setitem__(0, kind)


def add(entry: tarfile.TarInfo) -> Callable[[OciImage], None]:
    return lambda image: image.extra.append(entry)


def forged_docker_config() -> bytes:
    archive = docker_archive([files({"a": b""})], {"User": "nobody"})
    with tarfile.open(fileobj=io.BytesIO(archive)) as source:
        (config,) = [info.name for info in source if info.name.endswith(".json") and info.name != "manifest.json"]
    return rebuild(archive, {config: b'{"rootfs": {"type": "layers", "diff_ids": []}}'})


PLAIN = files({f"f{index}": bytes([index]) * 3000 for index in range(40)})
OCI = OciImage.of([files({"a": b"1" * 9000})], compress=True).archive()
HOSTILE = {
    "empty body": (b"", "empty"),
    "no archive": (b"just words, " * 300, "no tar archive"),
    "truncated tar": (PLAIN[:50_000], "truncated"),
    "truncated gzip": (gzip.compress(PLAIN)[:-20], "gzip data ends early"),
    "truncated xz": (lzma.compress(PLAIN)[:-20], "xz data ends early"),
    "truncated zstd": (zstandard.compress(os.urandom(200_000))[:-100], ""),
    "damaged gzip": (gzip.compress(PLAIN)[:40] + b"\xff" * 40 + gzip.compress(PLAIN)[80:], "broken gzip"),
    "truncated OCI archive": (OCI[: len(OCI) // 2], "truncated"),
    "forged layer": (bent(forge_blob), "has another digest"),
    "layer of another size": (bent(grow_blob), "are promised"),
    "forged diff_id": (bent(forge_diff_id), "the configuration promises"),
    "too few diff_ids": (bent(set_config(rootfs={"type": "layers", "diff_ids": []})), "lists 2 layers"),
    "digest of another algorithm": (bent(set_config(rootfs={"type": "layers", "diff_ids": ["md5:00", "md5:11"]})), "isn't supported"),
    "other operating system": (bent(set_config(os="windows")), "not for Linux"),
    "other architecture": (bent(set_config(architecture="mips")), "architecture 'mips'"),
    "variable without a name": (bent(set_config(config={"Env": ["=x"]})), "variable"),
    "configuration of another shape": (bent(set_config(config={"Env": "PATH=/"})), "not what it should be"),
    "unknown layer media type": (bent(set_media_type("application/x-squashfs")), "'application/x-squashfs'"),
    "foreign layer": (bent(set_media_type("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip")), "foreign"),
    "media type that lies": (bent(set_media_type(OCI_LAYER + "+gzip")), "broken gzip"),
    "no manifest": (rebuild(OCI, {"index.json": b'{"manifests": []}'}), "no image for linux"),
    "index that is nested without end": (rebuild(OCI, {"index.json": b'{"x": ' + b"[" * 100_000}), "nested too deeply"),
    "index without end": (rebuild(OCI, {"index.json": b"[" * 100_000}), "not what it should be"),
    "future layout": (rebuild(OCI, {"oci-layout": b'{"imageLayoutVersion": "9"}'}), "unknown version"),
    "absolute name": (bent(add(member("/etc/passwd"))), "leads outside"),
    "dotdot name": (bent(add(member("blobs/../../x"))), "leads outside"),
    "device": (bent(add(member("blobs/dev", tarfile.CHRTYPE))), "neither file nor directory"),
    "link outside": (bent(add(member("blobs/l", tarfile.SYMTYPE, linkname="../../etc/passwd"))), "leads outside"),
    "member twice": (bent(add(member("index.json"))), "twice"),
    "forged configuration": (forged_docker_config(), "has another digest"),
    "two images": (docker_archive([files({"a": b""})], images=2), "save one at a time"),
    "hostile layer": (OciImage.of([tar([member("../x")])]).archive(), '".." in the name'),
    "hostile plain tar": (tar([member("../x")]), '".." in the name'),
}


@pytest.mark.parametrize("case", HOSTILE)
async def test_bad_archives_are_refused_whole(images: ImageStore, tmp_path: Path, case: str) -> None:
    data, why = HOSTILE[case]
    with pytest.raises(ImageError) as refusal:
        await load(images, data)
    assert why in refusal.value.message
    assert left_behind(tmp_path / "images") == []
    assert images.page(None, 10) == []


BOMB = files({"zeros": bytes(30_000_000)})


@pytest.mark.parametrize(
    ("data", "limits", "why"),
    [
        (PLAIN, {"upload": 10_000}, "the upload exceeds"),
        (gzip.compress(BOMB), {"unpacked": 1_000_000}, "unpacked archive exceeds"),
        (zstandard.compress(BOMB), {"unpacked": 1_000_000}, "unpacked archive exceeds"),
        (lzma.compress(BOMB), {"unpacked": 1_000_000}, "unpacked archive exceeds"),
        (OciImage.of([BOMB], compress=True).archive(), {"unpacked": 1_000_000}, "unpacked archive exceeds"),
        (files({f"f{index}": b"" for index in range(200)}), {"entries": 100}, "more than 100 entries"),
        (OciImage.of([files({"a": b""})] * 3).archive(), {"layers": 2}, "3 layers"),
        (OciImage.of([files({"a": b""})]).archive(), {"members": 3}, "more than 3 files"),
        (OciImage.of([files({"a": b""})]).archive(), {"document": 100}, "at most 100"),
    ],
)
async def test_bombs_are_stopped_at_the_limit(tmp_path: Path, store: Store, data: bytes, limits: dict[str, int], why: str) -> None:
    images = ImageStore(tmp_path / "images", store, limits=ImportLimits(disk_reserve=0, **limits))
    await images.open()
    with pytest.raises(ImageError, match=why):
        await load(images, data)
    assert left_behind(tmp_path / "images") == []


async def test_a_full_disk_refuses_the_import_and_leaves_nothing(tmp_path: Path, store: Store) -> None:
    images = ImageStore(tmp_path / "images", store, limits=ImportLimits(disk_reserve=1 << 60))
    await images.open()
    with pytest.raises(NoCapacity) as refusal:
        await load(images, PLAIN)
    assert refusal.value.reason == "disk"
    assert left_behind(tmp_path / "images") == []


async def test_a_format_that_is_named_is_not_guessed(images: ImageStore) -> None:
    archive = OciImage.of([files({"a": b"1"})]).archive()
    as_tar = await load(images, archive, format="tar")
    as_image = await load(images, archive)
    assert as_tar.layers != as_image.layers
    with pytest.raises(ImageError):
        await load(images, PLAIN, format="docker-archive")


async def test_only_plain_tars_can_be_placed(images: ImageStore) -> None:
    with pytest.raises(ImageError, match="plain tars"):
        await load(images, OCI, format="oci-archive", at="/opt")


# -- names and versions --------------------------------------------------------------------------------------------------------------------


async def test_each_import_makes_the_next_version_and_no_number_comes_back(images: ImageStore) -> None:
    first = await load(images, files({"a": b"1"}))
    second = await load(images, files({"a": b"2"}))
    assert (first.version, second.version) == (1, 2)
    assert images.get("image") == second
    assert images.get("image@1") == first
    assert images.get(first.digest) == first
    await images.remove("image@2", ADMIN)
    assert images.get("image") == first
    assert (await load(images, files({"a": b"3"}))).version == 3
    await images.remove("image", ADMIN)
    assert (await load(images, files({"a": b"3"}))).version == 4


@pytest.mark.parametrize("reference", ["nothing", "image@9", "image@x", "sha256:" + "0" * 64, ""])
async def test_a_reference_that_leads_nowhere_is_not_found(images: ImageStore, reference: str) -> None:
    await load(images, PLAIN)
    with pytest.raises(ImageNotFound):
        images.get(reference)
    with pytest.raises(ImageNotFound):
        images.resolve(reference, None, ())


async def test_everything_is_there_after_a_restart(images: ImageStore, store: Store, tmp_path: Path) -> None:
    info = await load(images, PLAIN)
    again = ImageStore(tmp_path / "images", store, limits=ImportLimits(disk_reserve=0))
    await again.open()
    assert again.get("image@1") == info
    assert again.resolve("image", None, ()).layers == tuple(info.layers)
    steps: list[str | None] = []
    assert (await load(again, PLAIN, tell=lambda line: steps.append(line.step))).version == 2
    assert "converting" not in steps


async def test_pages_hold_every_image_once_in_order(images: ImageStore) -> None:
    for name in ("b", "a", "c", "a"):
        await load(images, PLAIN, name=name)
    seen: list[tuple[str, int]] = []
    while page := images.page(seen[-1] if seen else None, 2):
        seen += [(info.name, info.version) for info in page]
    assert seen == [("a", 1), ("a", 2), ("b", 1), ("c", 1)]


async def test_a_name_belongs_to_the_project_that_used_it_first(images: ImageStore) -> None:
    mine, theirs = Caller(project="mine", admin=False), Caller(project="theirs", admin=False)
    await load(images, PLAIN, caller=mine)
    with pytest.raises(PermissionDenied):
        await load(images, PLAIN, caller=theirs)
    with pytest.raises(PermissionDenied):
        await images.remove("image", theirs)
    await load(images, PLAIN, caller=mine)
    await load(images, PLAIN, caller=ADMIN)
    await images.remove("image", mine)
    assert (await load(images, PLAIN, caller=theirs)).version == 4


# -- environments --------------------------------------------------------------------------------------------------------------------------


async def test_an_environment_stacks_toolkits_on_the_workspace_on_the_base(images: ImageStore) -> None:
    def layers(*env: str) -> bytes:
        return OciImage.of([files({env[0]: b"1"})], run={"Env": list(env), "User": env[0]}).archive()

    base = await load(images, layers("A=base", "B=base", "C=base"), name="base")
    work = await load(images, layers("B=work"), name="work", kind="workspace")
    one = await load(images, layers("C=one"), name="one", kind="toolkit")
    two = await load(images, layers("C=two"), name="two", kind="toolkit")
    made = images.resolve("base", "work", ("one", "two"))
    assert made.layers == (*two.layers, *one.layers, *work.layers, *base.layers)
    assert made.config.env == {"A": "base", "B": "work", "C": "two"}
    assert made.config.user == "A=base"
    assert (made.image, made.workspace, made.toolkits) == ("base@1", "work@1", ("one@1", "two@1"))


async def test_a_settled_environment_says_again_what_lower_layers_say_of_directories(images: ImageStore, tmp_path: Path) -> None:
    named = [member("home", tarfile.DIRTYPE, mode=0o711), member("home/agent", tarfile.DIRTYPE, mode=0o700, uid=1000)]
    await load(images, tar([*named, member("etc")]), name="base")
    await load(images, files({"a": b"1"}), name="work", kind="workspace", at="/home/agent/repo")
    await load(images, tar([*named, member("home/agent/x")]), name="tool", kind="toolkit")
    for names in (("base", None, ()), ("base", None, ("tool",)), ("base", "work", ("tool",))):
        plain = images.resolve(*names)
        assert await images.settle(plain) == plain, "nothing is lacking"
    plain = images.resolve("base", "work", ())
    settled = await images.settle(plain)
    assert settled.layers[1:] == plain.layers
    cover = settled.layers[0]
    found = dict(erofs.entries((tmp_path / "images/blobs" / hex_of(cover.digest)).read_bytes()))
    assert {path: (entry.mode & 0o7777, entry.uid) for path, entry in found.items() if path} == {
        b"home": (0o711, 0),
        b"home/agent": (0o700, 1000),
    }
    assert cover.blob is None
    # It isn't collected while it may be wanted, and made again where it is gone.
    await images.collect_garbage()
    assert await images.settle(plain) == settled and len(await images.ensure(settled)) == 3
    (tmp_path / "images/blobs" / hex_of(cover.digest)).unlink()
    assert len(await images.ensure(await images.settle(plain))) == 3


async def test_a_layer_that_passes_through_a_link_of_the_base_is_refused_and_told_where_to_go(images: ImageStore) -> None:
    link = member("lib", tarfile.SYMTYPE, linkname="usr/lib")
    await load(
        images, tar([member("usr/lib/libc"), link, member("run"), member("var/run", tarfile.SYMTYPE, linkname="../run")]), name="base"
    )
    await load(images, files({"f": b"1"}), name="at-lib", kind="toolkit", at="/lib/mytool")
    await load(images, files({"f": b"1"}), name="at-run", kind="toolkit", at="/var/run/mytool")
    await load(images, files({"f": b"1"}), name="at-usr-lib", kind="toolkit", at="/usr/lib/mytool")
    await load(images, tar([member("lib", tarfile.DIRTYPE), member("lib/own")]), name="named", kind="toolkit")
    for toolkits, entry in ((("at-lib",), "lib"), (("at-usr-lib", "at-run"), "var/run")):
        with pytest.raises(ImageError, match=f'entry "{entry}": the layers below have a link to'):
            await images.settle(images.resolve("base", None, toolkits))
    # Who names a directory means one, as in every image; and what lies under one of these is in it.
    for toolkits in (("at-usr-lib",), ("named",), ("named", "at-lib")):
        await images.settle(images.resolve("base", None, toolkits))


async def test_an_image_of_another_kind_is_refused_by_field(images: ImageStore) -> None:
    await load(images, PLAIN, name="base")
    await load(images, PLAIN, name="tool", kind="toolkit")
    for arguments, field in (
        (("tool", None, ()), "container_image"),
        (("base", "tool", ()), "workspace"),
        (("base", None, ("base",)), "toolkits"),
    ):
        with pytest.raises(InvalidArgument) as refusal:
            images.resolve(*arguments)
        assert refusal.value.field == field


async def test_a_new_version_is_seen_by_the_next_resolve(images: ImageStore) -> None:
    await load(images, files({"a": b"1"}))
    assert images.resolve("image", None, ()).image == "image@1"
    await load(images, files({"a": b"2"}))
    assert images.resolve("image", None, ()).image == "image@2"
    await images.remove("image", ADMIN)
    with pytest.raises(ImageNotFound):
        images.resolve("image", None, ())


async def test_layers_with_too_many_owners_together_are_refused(images: ImageStore) -> None:
    for name, kind, first in (("base", "base", 100_000), ("tool", "toolkit", 200_000)):
        await load(images, tar([member(f"f{index}", uid=first + index) for index in range(60)]), name=name, kind=kind)
    images.resolve("base", None, ())
    with pytest.raises(ImageError, match="120 owners"):
        images.resolve("base", None, ("tool",))


# -- removal, garbage, crashes -------------------------------------------------------------------------------------------------------------


async def test_what_sandboxes_use_is_neither_removed_nor_collected(images: ImageStore, tmp_path: Path) -> None:
    info = await load(images, PLAIN)
    for held in (info.layers[0].digest, info.layers[0].digest.removeprefix("sha256:")):
        images.in_use = lambda held=held: {held}  # type: ignore[misc]
        with pytest.raises(Conflict):
            await images.remove("image", ADMIN)
        with pytest.raises(Conflict):
            await images.remove("image@1", ADMIN)
    images.in_use = set
    await images.remove("image", ADMIN)
    images.in_use = lambda: {digest for digest in (info.layers[0].digest, info.layers[0].blob) if digest is not None}
    assert await images.collect_garbage() == 0
    assert len(left_behind(tmp_path / "images")) == 2
    images.in_use = set
    assert await images.collect_garbage() == info.size
    assert left_behind(tmp_path / "images") == []


async def test_gc_keeps_what_other_images_share(images: ImageStore) -> None:
    await load(images, PLAIN, name="a")
    shared = await load(images, PLAIN, name="b")
    await images.remove("a", ADMIN)
    assert await images.collect_garbage() == 0
    assert images.resolve("b", None, ()).layers == tuple(shared.layers)


async def test_after_gc_the_same_archive_is_converted_again(images: ImageStore, tmp_path: Path) -> None:
    await load(images, PLAIN)
    await images.remove("image", ADMIN)
    await images.collect_garbage()
    info = await load(images, PLAIN)
    assert all((tmp_path / "images" / "blobs" / layer.digest.removeprefix("sha256:")).exists() for layer in info.layers)


async def test_gc_while_imports_run_takes_nothing_from_them(images: ImageStore, tmp_path: Path) -> None:
    async def collect(until: asyncio.Event) -> None:
        while not until.is_set():
            await images.collect_garbage()
            await asyncio.sleep(0)

    done = asyncio.Event()
    collecting = asyncio.create_task(collect(done))
    made = await asyncio.gather(*(load(images, files({"f": bytes([index]) * 50_000}), name=f"n{index}") for index in range(8)))
    done.set()
    await collecting
    for info in made:
        for layer in info.layers:
            for name in (layer.digest, layer.blob or layer.digest):
                assert (tmp_path / "images" / "blobs" / name.removeprefix("sha256:")).exists()


async def test_a_start_removes_what_a_crash_left(images: ImageStore, store: Store, tmp_path: Path) -> None:
    info = await load(images, PLAIN)
    root = tmp_path / "images"
    (root / "tmp" / "import-dead").mkdir()
    (root / "tmp" / "import-dead" / "body").write_bytes(b"half")
    (root / "blobs" / ("0" * 64)).write_bytes(b"a blob that no image names")
    again = ImageStore(root, store, limits=ImportLimits(disk_reserve=0))
    await again.open()
    assert len(left_behind(root)) == 2
    assert again.get("image") == info


async def test_a_client_that_goes_away_leaves_nothing(images: ImageStore, tmp_path: Path) -> None:
    async def breaking() -> AsyncIterator[bytes]:
        yield PLAIN[:40_000]
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await images.import_archive(request(), breaking(), lambda line: None)
    assert left_behind(tmp_path / "images") == []


def program(path: Path, script: str) -> Path:
    """A shell script in the place of the converter."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


async def test_a_cancelled_conversion_ends_its_program_and_leaves_nothing(tmp_path: Path, store: Store) -> None:
    pid_pipe = tmp_path / "pid"
    os.mkfifo(pid_pipe)
    stuck = program(tmp_path / "stuck-mklayer", f"echo $$ > {pid_pipe}; exec sleep 1000")
    images = ImageStore(tmp_path / "images", store, limits=ImportLimits(disk_reserve=0), converter=stuck)
    await images.open()
    importing = asyncio.create_task(load(images, PLAIN))
    async with asyncio.timeout(DEADLINE_S):
        pid = int(await asyncio.to_thread(pid_pipe.read_text))
    importing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await importing
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert left_behind(tmp_path / "images") == []


async def test_a_converter_that_breaks_is_our_fault_and_not_the_archives(tmp_path: Path, store: Store) -> None:
    broken = program(tmp_path / "broken-mklayer", "kill -SEGV $$")
    images = ImageStore(tmp_path / "images", store, limits=ImportLimits(disk_reserve=0), converter=broken)
    await images.open()
    with pytest.raises(DSecError) as failure:
        await load(images, PLAIN)
    assert failure.value.code == "internal"
    assert left_behind(tmp_path / "images") == []


IMPORT_UNTIL_KILLED = """
import asyncio, sys
from pathlib import Path
from tests.unit.test_images_import import load
from dsec.images import ImageStore, ImportLimits
from dsec.store import Store
from tests.unit.images_archives import files

async def main(root):
    store = await Store.open_file(root / "store.sqlite")
    images = ImageStore(root / "images", store, limits=ImportLimits(disk_reserve=0))
    await images.open()
    for number in range(1_000_000):
        data = files({"f": str(number).encode() * 40_000})
        await load(images, data, tell=lambda line: print(line.step, flush=True))

asyncio.run(main(Path(sys.argv[1])))
"""


def kill_at(root: Path, moment: str) -> None:
    """Runs one import after the other below ``root`` in a process of its own, and kills it when the third one is at ``moment``."""
    command = [sys.executable, "-c", IMPORT_UNTIL_KILLED, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = 0
        for line in process.stdout:
            seen += line.strip() == moment
            if seen == 3:
                break
        process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("moment", ["converting", "storing"])
async def test_kill_9_at_any_step_leaves_whole_images_only(tmp_path: Path, moment: str) -> None:
    await asyncio.to_thread(kill_at, tmp_path, moment)
    store = await Store.open_file(tmp_path / "store.sqlite")
    try:
        images = ImageStore(tmp_path / "images", store, limits=ImportLimits(disk_reserve=0))
        await images.open()
        blobs = {path.name for path in (tmp_path / "images" / "blobs").iterdir()}
        kept = images.page(None, 100)
        needed = {
            name.removeprefix("sha256:") for info in kept for layer in info.layers for name in (layer.digest, layer.blob or layer.digest)
        }
        assert blobs == needed
        assert [info.version for info in kept] == list(range(1, len(kept) + 1))
        assert len(kept) >= 2
        assert list((tmp_path / "images" / "tmp").iterdir()) == []
        found: list[ImageFinding] = []
        await images.fsck(found.append, deep=True, repair=False)
        assert found == []
    finally:
        await store.close()
