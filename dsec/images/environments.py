"""From what a sandbox asks for (base, workspace, toolkits) to the layers that it is made of. Pure but for the catalog it reads."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dsec.images.catalog import Catalog, Entry
from dsec.images.names import exact, parse_reference
from libdsec.errors import ImageError, ImageNotFound, InvalidArgument
from libdsec.schema import ImageConfig, LayerInfo

LOWER_LAYERS_MAX = 128
"""The most that the spawner stacks; overlayfs takes 500."""
EXTRA_IDS_MAX = 100
"""Owner ids above 65,535 that a sandbox's id map has room for."""


class Environment(msgspec.Struct, kw_only=True, frozen=True):
    """What a sandbox starts from."""

    layers: tuple[LayerInfo, ...]
    """Top first: the last toolkit's, …, the workspace's, the base's."""
    config: ImageConfig
    """The base's, with the variables of the workspace and the toolkits set over its own."""
    image: str
    """Exact, with the version; so are the other two."""
    workspace: str | None
    toolkits: tuple[str, ...]
    owners: frozenset[str] = frozenset()
    """Projects whose sandboxes parts of it were packed from: what was written in a sandbox is seen in its own project only."""


def compose(catalog: Catalog, image: str, workspace: str | None, toolkits: Sequence[str]) -> Environment:
    """Raises ImageNotFound for a reference that leads nowhere, InvalidArgument for an image of the wrong kind, ImageError where the parts
    are too much together."""
    base = _find(catalog, image, "base", "container_image")
    upper = [] if workspace is None else [_find(catalog, workspace, "workspace", "workspace")]
    tools = [_find(catalog, toolkit, "toolkit", "toolkits") for toolkit in toolkits]
    entries = [base, *upper, *tools]
    stack = [entry.info for entry in entries]
    layers = tuple(layer for info in reversed(stack) for layer in reversed(info.layers))
    if len(layers) > LOWER_LAYERS_MAX:
        raise ImageError(f"{len(layers)} layers together, a sandbox takes {LOWER_LAYERS_MAX}")
    extra_ids = {extra for layer in layers for extra in layer.extra_ids}
    if len(extra_ids) > EXTRA_IDS_MAX:
        raise ImageError(f"files of {len(extra_ids)} owners above 65,535 together, {EXTRA_IDS_MAX} are possible")
    env = {name: value for info in stack for name, value in info.config.env.items()}
    return Environment(
        layers=layers,
        config=msgspec.structs.replace(base.info.config, env=env),
        image=_exact(base),
        workspace=_exact(upper[0]) if upper else None,
        toolkits=tuple(map(_exact, tools)),
        owners=frozenset(entry.project for entry in entries if any(layer.diff for layer in entry.info.layers)),
    )


def _exact(entry: Entry) -> str:
    return exact(entry.info.name, entry.info.version)


def _find(catalog: Catalog, text: str, kind: str, field: str) -> Entry:
    entry = catalog.find(parse_reference(text))
    if entry is None:
        raise ImageNotFound(f"there is no image {text!r}: import it, or see what there is with `dsec image ls`", field=field)
    if entry.info.kind != kind:
        raise InvalidArgument(f"{text!r} is a {entry.info.kind}, where a {kind} is needed", field=field)
    return entry
