"""Lock files: the exact layers and network rules of an environment, written once and started from again and again.

TOML or JSON by the file's suffix. References in it are ``name@sha256:…``: found on every node that shares the store, and the same for ever.
"""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Literal

import msgspec

from libdsec.errors import InvalidArgument

FILE_LIMIT = 1 << 20
"""Bytes of a lock file."""
VERSION: Literal[1] = 1
_HEADER = "# Written by `dsec lock`: `dsec create --lock FILE` starts exactly this.\n"


class Lock(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What makes an environment reproducible."""

    version: Literal[1] = VERSION
    """Of the format."""
    image: str
    workspace: str | None = None
    toolkits: tuple[str, ...] = ()
    network: Literal["aether", "none", "bridged"] = "aether"
    network_rules: dict[str, bool] | None = None

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it, whole or not at all. Raises InvalidArgument for a suffix other than .toml and .json, OSError."""
        target = Path(path)
        text = self._toml() if _is_toml(target) else json.dumps(self._fields(), indent=2) + "\n"
        partial = target.with_name(f".{target.name}.part")
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Lock:
        """Read one. Raises InvalidArgument that says what is wrong with the file, OSError."""
        source = Path(path)
        is_toml = _is_toml(source)
        with source.open("rb") as file:
            data = file.read(FILE_LIMIT + 1)
        try:
            if len(data) > FILE_LIMIT:
                raise ValueError(f"it has more than {FILE_LIMIT} bytes")
            lock = msgspec.convert(tomllib.loads(data.decode()) if is_toml else json.loads(data), cls)
            for reference in (lock.image, *([lock.workspace] if lock.workspace else []), *lock.toolkits):
                if "@" not in reference:
                    raise ValueError(f"{reference!r} isn't pinned: NAME@sha256:… or NAME@VERSION")
        except (ValueError, msgspec.ValidationError, RecursionError) as error:
            raise InvalidArgument(f"{source} is no lock file: {error}", field="lock") from error
        return lock

    def _fields(self) -> dict[str, object]:
        fields = msgspec.structs.asdict(self)
        return {name: value for name, value in fields.items() if value not in (None, ())}

    def _toml(self) -> str:
        # Strings of JSON are basic strings of TOML, and so are its arrays of strings.
        fields = self._fields()
        rules = fields.pop("network_rules", None)
        lines = [f"{name} = {json.dumps(value)}" for name, value in fields.items()]
        if isinstance(rules, dict):
            lines += ["", "[network_rules]", *(f"{json.dumps(rule)} = {json.dumps(allowed)}" for rule, allowed in rules.items())]
        return _HEADER + "\n".join(lines) + "\n"


def _is_toml(path: Path) -> bool:
    if path.suffix not in (".toml", ".json"):
        raise InvalidArgument(f"{path}: a lock file ends in .toml or .json", field="lock")
    return path.suffix == ".toml"
