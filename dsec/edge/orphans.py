"""Sandboxes that nobody may know of: their creator went away before it was told of them.

A create request *asks* for a sandbox, and in the end has either *told* of it (its line was handed to a live connection) or *given it up*.
A sandbox that every request has given up and that no call has named is an orphan. With an idempotency key it gets a grace in which it can
still be asked for; without one it is stopped at once. So is one with a key that was made for the request (:data:`ONCE`), if who sent that
has ended the connection himself. Its key is free then, for the end may have been a proxy's, and its client asks again.

Reading names nothing: a list, and what may be asked of all that a list shows (the record, figures, events). Who has only an id and wants to
keep the sandbox attaches to it.

In the journal ``Record.told`` stays None on the ordinary way, which therefore costs no write: after a restart a sandbox that runs counts as
told (it may have been), one that was still being created as untold (nobody is answered before the journal has it running). Giving up
writes False. Whoever finds an orphan writes True *before* he is answered: a crash between the two leaves a sandbox kept that nobody knows,
never one taken that somebody does.
"""

from __future__ import annotations

import structlog

from dsec.edge.endings import ORPHANED, Endings
from dsec.edge.failures import as_error
from dsec.edge.inventory import Inventory
from dsec.edge.journal import JournalError
from dsec.edge.lifetimes import Lifetimes
from dsec.edge.sandbox import Sandbox
from libdsec.errors import DSecError
from libdsec.idempotency import ONCE

_log = structlog.get_logger("dsec.edge")


class Orphans:
    """Keeps account of who knows of a sandbox, and lets go of those that nobody does. The grace itself ends in :class:`Lifetimes`."""

    def __init__(self, inventory: Inventory, endings: Endings, lifetimes: Lifetimes) -> None:
        self._inventory = inventory
        self._endings = endings
        self._lifetimes = lifetimes

    def ask(self, sandbox: Sandbox) -> None:
        """A request wants to name the sandbox. From now on it is no orphan, until :meth:`tell` or :meth:`give_up` ends the asking."""
        sandbox.askers += 1
        sandbox.orphan_until = None

    async def claim(self, sandbox: Sandbox) -> None:
        """Between :meth:`ask` and naming the sandbox: the journal must not have it as untold. Raises Unavailable: then it isn't named."""
        if not sandbox.untold_in_journal:
            return
        sandbox.record.told = True
        try:
            await self._inventory.journal.update(sandbox.record)
        except JournalError as error:
            raise as_error(error) from error
        sandbox.untold_in_journal = False

    def tell(self, sandbox: Sandbox) -> None:
        """The request has named the sandbox to somebody."""
        sandbox.askers -= 1
        sandbox.told = True

    async def give_up(self, sandbox: Sandbox, *, left: bool = False) -> None:
        """The request won't name the sandbox. If nobody else does or did, it is an orphan. ``left``: the request's sender has gone on
        purpose, so it won't ask again."""
        inventory, record = self._inventory, sandbox.record
        sandbox.askers -= 1
        if sandbox.told or sandbox.askers or sandbox.forget or sandbox.stopping is not None or inventory.get(sandbox.id) is not sandbox:
            return
        try:
            if record.key is None and not inventory.closing:
                await self._endings.stop(sandbox, ORPHANED)
                return
            if left and record.key is not None and record.key.startswith(ONCE) and not inventory.closing:
                await self._endings.stop(sandbox, ORPHANED, forget=True)
                return
            record.told = False
            sandbox.untold_in_journal = True
            self._grant_grace(sandbox)
            self._lifetimes.watch(sandbox)
            await inventory.journal.update(record)
        except (DSecError, JournalError) as error:
            # A stop goes on in the sweep; an orphan that can't be written down is one until the next restart.
            _log.warning("giving up a sandbox failed half-way", sandbox=sandbox.id, error=str(error))

    async def keep(self, sandbox: Sandbox) -> None:
        """A call names the sandbox, so somebody knows of it. Before anything is answered. Raises Unavailable."""
        self.ask(sandbox)
        try:
            await self.claim(sandbox)
        except BaseException:
            await self.give_up(sandbox)
            raise
        self.tell(sandbox)

    def adopt(self, sandbox: Sandbox) -> None:
        """After a restart: what the journal says of it. The grace begins anew."""
        record = sandbox.record
        if record.told is None:
            record.told = record.state != "creating"
        sandbox.told = record.told
        sandbox.untold_in_journal = not record.told
        if not record.told:
            self._grant_grace(sandbox)

    def _grant_grace(self, sandbox: Sandbox) -> None:
        sandbox.orphan_until = self._inventory.clock.monotonic() + self._inventory.config.orphan_grace_s
