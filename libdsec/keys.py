"""API keys, as an administrator handles them."""

from __future__ import annotations

import builtins
import secrets

from libdsec.errors import NotFound
from libdsec.ids import NAME
from libdsec.schema import KeyInfo, KeyRequest, NewKey
from libdsec.transport import Answer, Transport, encode

_key = Answer(KeyInfo)
_keys = Answer(list[KeyInfo])
_new_key = Answer(NewKey)


class Keys:
    """The server's API keys, reached as ``client.keys``. Every call raises PermissionDenied unless the client's own key is an admin's."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def create(self, name: str, *, project: str | None = None, admin: bool = False, expires_in_s: float | None = None) -> NewKey:
        """Make a key. The answer is the only place where the key itself is ever shown.

        Without ``project`` the key gets a project of its own: sandboxes are seen within their project only. ``expires_in_s``: seconds from
        now; None: never. Raises InvalidArgument. Interrupted calls are repeated with the same idempotency key; repeating it yourself makes
        a second key.
        """
        request = KeyRequest(name=name, project=project, admin=admin, expires_in_s=expires_in_s)
        headers = {"Idempotency-Key": secrets.token_hex(12)}
        return await self._transport.call("POST", self._transport.at("/v1/keys"), _new_key, body=encode(request), headers=headers)

    async def list(self) -> builtins.list[KeyInfo]:
        """All keys, also the expired and revoked ones, never the keys themselves. Safe to repeat."""
        return await self._transport.call("GET", self._transport.at("/v1/keys"), _keys)

    async def revoke(self, key_id: str) -> KeyInfo:
        """End a key at once. Revoking a revoked one changes nothing. Raises NotFound. Safe to repeat."""
        if not NAME.fullmatch(key_id):
            raise NotFound(f"there is no key {key_id!r}: that can't be an id")
        return await self._transport.call("DELETE", self._transport.at(f"/v1/keys/{key_id}"), _key)
