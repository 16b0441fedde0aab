"""API keys: who may call, and in whose name.

Kept in the Store and, all of them, in memory: authenticating a request is one dictionary look-up, one SHA-256 and one constant-time
comparison (see :mod:`dsec.api.bearer` for why no slow hash is wanted). A revocation is written first and then counts at once in this
process.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import Callable

import msgspec
from sqlalchemy import Boolean, Column, Float, LargeBinary, String, Table, delete, insert, select, update
from sqlalchemy.engine import RowMapping

from dsec.api.bearer import Seed, mint, prefix, split
from dsec.store import Store, metadata
from libdsec.errors import AuthenticationError, InvalidArgument, NotFound
from libdsec.schema import KeyInfo, KeyRequest, NewKey

DEFAULT_PROJECT = "default"
"""The project of the keys that ``dsec up`` makes."""
NAME_LIMIT = 200
"""Characters in the name of a key."""
RETRY_WINDOW_S = 24 * 3600.0
"""How long a repeated idempotency key finds the API key that its first use made."""

_PROJECT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_NOBODY = bytes(32)
"""Compared against where the key id is unknown, so that an unknown id takes as long as a wrong secret."""

_table = Table(
    "api_keys",
    metadata,
    Column("id", String(8), primary_key=True),
    Column("name", String(NAME_LIMIT), nullable=False),
    Column("project", String(63), nullable=False),
    Column("admin", Boolean, nullable=False),
    Column("digest", LargeBinary(32), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("revoked_at", Float),
    Column("local", Boolean, nullable=False, default=False),
    Column("idempotency_key", String(NAME_LIMIT)),
)


class Principal(msgspec.Struct, frozen=True):
    """Who makes a request."""

    key_id: str
    project: str
    admin: bool


class _Key(msgspec.Struct, frozen=True):
    """One row of the table, in memory."""

    info: KeyInfo
    principal: Principal
    digest: bytes
    local: bool
    idempotency_key: str | None


class Keys:
    """The keys of one store. ``clock`` gives Unix seconds."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.time) -> None:
        self._engine = store.engine
        self._clock = clock
        self._by_id: dict[str, _Key] = {}
        self._creating = asyncio.Lock()

    async def open(self) -> None:
        """Read every key from the store."""
        async with self._engine.connect() as connection:
            rows = (await connection.execute(select(_table))).mappings().all()
        self._by_id = {key.info.id: key for key in map(_from_row, rows)}

    def authenticate(self, authorization: str | None) -> Principal:
        """Who presents this ``Authorization`` header.

        Raises AuthenticationError, always with the same words, where it is absent, malformed, unknown, wrong, expired or revoked: the
        caller learns nothing about which keys exist.
        """
        scheme, _, presented = (authorization or "").partition(" ")
        seed = split(presented.strip()) if scheme.lower() == "bearer" else None
        if seed is not None:
            key = self._by_id.get(seed.id)
            matches = hmac.compare_digest(seed.digest, _NOBODY if key is None else key.digest)
            if key is not None and matches and self._is_valid(key):
                return key.principal
        raise AuthenticationError("a valid API key is needed: Authorization: Bearer dsec_…")

    def _is_valid(self, key: _Key) -> bool:
        return key.info.revoked_at is None and (key.info.expires_at is None or self._clock() < key.info.expires_at)

    def infos(self) -> list[KeyInfo]:
        """Every key, also the expired and revoked ones, oldest first."""
        return sorted((key.info for key in self._by_id.values()), key=lambda info: (info.created_at, info.id))

    async def create(self, request: KeyRequest, *, idempotency_key: str | None = None) -> NewKey:
        """Make a key.

        A repeated ``idempotency_key`` gives the same key id with a fresh secret in place of the first one, which nobody received: the store
        can't show a secret twice. Raises InvalidArgument.
        """
        _check(request)
        async with self._creating:
            return await self._create(request, idempotency_key)

    async def _create(self, request: KeyRequest, idempotency_key: str | None) -> NewKey:
        minted = mint()
        now = self._clock()
        earlier = self._made_for(idempotency_key, now)
        if earlier is not None:
            text = minted.text.replace(prefix(minted.seed.id), prefix(earlier.info.id))
            key = msgspec.structs.replace(earlier, digest=minted.seed.digest)
            await self._write(key)
            return NewKey(key=text, info=key.info)
        info = KeyInfo(
            id=minted.seed.id,
            name=request.name,
            prefix=prefix(minted.seed.id),
            project=request.project or f"p-{minted.seed.id}",
            admin=request.admin,
            created_at=now,
            expires_at=None if request.expires_in_s is None else now + request.expires_in_s,
        )
        await self._write(_key(info, minted.seed.digest, idempotency_key=idempotency_key))
        return NewKey(key=minted.text, info=info)

    def _made_for(self, idempotency_key: str | None, now: float) -> _Key | None:
        if idempotency_key is None:
            return None
        for key in self._by_id.values():
            if key.idempotency_key == idempotency_key and key.info.revoked_at is None and now - key.info.created_at < RETRY_WINDOW_S:
                return key
        return None

    async def revoke(self, key_id: str) -> KeyInfo:
        """End a key for good; of a revoked key: its record again. Requests that are under way go on. Raises NotFound."""
        key = self._by_id.get(key_id)
        if key is None:
            raise NotFound(f"there is no key {key_id!r}")
        if key.info.revoked_at is None:
            revoked = msgspec.structs.replace(key.info, revoked_at=self._clock())
            await self._write(msgspec.structs.replace(key, info=revoked))
        return self._by_id[key_id].info

    async def plant_first(self, seed: Seed) -> bool:
        """Accept ``seed`` as the store's first key (an admin's). False, and nothing done, where other keys were made before."""
        if any(not key.local and key.info.id != seed.id for key in self._by_id.values()):
            return False
        if seed.id not in self._by_id:
            await self._write(_key(self._admin_info(seed, "first key"), seed.digest))
        return True

    async def plant_local(self, seed: Seed) -> None:
        """Accept ``seed`` as the key of the local user of this run of the service; that of an earlier run ends."""
        stale = [key.info.id for key in self._by_id.values() if key.local and key.info.id != seed.id]
        if stale:
            async with self._engine.begin() as connection:
                await connection.execute(delete(_table).where(_table.c.id.in_(stale)))
            for key_id in stale:
                del self._by_id[key_id]
        if seed.id not in self._by_id:
            await self._write(_key(self._admin_info(seed, "dsec up, local user"), seed.digest, local=True))

    def _admin_info(self, seed: Seed, name: str) -> KeyInfo:
        return KeyInfo(id=seed.id, name=name, prefix=prefix(seed.id), project=DEFAULT_PROJECT, admin=True, created_at=self._clock())

    async def _write(self, key: _Key) -> None:
        row = _to_row(key)
        async with self._engine.begin() as connection:
            if key.info.id in self._by_id:
                await connection.execute(update(_table).where(_table.c.id == key.info.id).values(row))
            else:
                await connection.execute(insert(_table).values(row))
        self._by_id[key.info.id] = key


def check_project(name: str) -> None:
    """Raises InvalidArgument for what can't be a project's name."""
    if not _PROJECT.fullmatch(name):
        raise InvalidArgument("project: up to 63 of a-z, 0-9 and -, not beginning with -", field="project")


def _check(request: KeyRequest) -> None:
    if not request.name.strip() or len(request.name) > NAME_LIMIT:
        raise InvalidArgument(f"name: 1 to {NAME_LIMIT} characters that say what the key is for", field="name")
    if request.project is not None:
        check_project(request.project)
    if request.expires_in_s is not None and not 0 < request.expires_in_s < float("inf"):
        raise InvalidArgument("expires_in_s: seconds from now, more than 0", field="expires_in_s")


def _key(info: KeyInfo, digest: bytes, *, local: bool = False, idempotency_key: str | None = None) -> _Key:
    return _Key(info, Principal(info.id, info.project, info.admin), digest, local, idempotency_key)


def _from_row(row: RowMapping) -> _Key:
    info = KeyInfo(
        id=row["id"],
        name=row["name"],
        prefix=prefix(row["id"]),
        project=row["project"],
        admin=row["admin"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
    )
    return _key(info, row["digest"], local=row["local"], idempotency_key=row["idempotency_key"])


def _to_row(key: _Key) -> dict[str, str | bool | bytes | float | None]:
    info = key.info
    return {
        "id": info.id,
        "name": info.name,
        "project": info.project,
        "admin": info.admin,
        "digest": key.digest,
        "created_at": info.created_at,
        "expires_at": info.expires_at,
        "revoked_at": info.revoked_at,
        "local": key.local,
        "idempotency_key": key.idempotency_key,
    }
