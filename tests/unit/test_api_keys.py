"""API keys: what they look like, who gets in with them, and what the store keeps of them."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.api.bearer import Seed, mint, split
from dsec.api.keys import Keys
from dsec.store import Store
from libdsec.errors import AuthenticationError, InvalidArgument, NotFound
from libdsec.schema import KeyRequest


class Clock:
    """Unix seconds that stand still until they are moved."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = await Store.open_file(tmp_path / "store.sqlite")
    yield opened
    await opened.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def keys(store: Store, clock: Clock) -> Keys:
    opened = Keys(store, clock=clock)
    await opened.open()
    return opened


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def refusal(keys: Keys, authorization: str | None) -> str:
    with pytest.raises(AuthenticationError) as caught:
        keys.authenticate(authorization)
    return caught.value.message


def test_a_key_carries_160_random_bits_after_its_id() -> None:
    first, second = mint(), mint()
    assert first.text != second.text
    prefix, key_id, secret = first.text.split("_")
    assert (prefix, key_id) == ("dsec", first.seed.id)
    assert len(secret) * 5 >= 160
    assert split(first.text) == first.seed


def test_a_seed_survives_the_command_line_and_holds_no_secret() -> None:
    minted = mint()
    assert Seed.parse(str(minted.seed)) == minted.seed
    assert minted.text.rpartition("_")[2] not in str(minted.seed)
    with pytest.raises(ValueError, match="sha256"):
        Seed.parse("no-seed")


async def test_a_new_key_gets_in_as_its_project(keys: Keys) -> None:
    made = await keys.create(KeyRequest(name="trainer", project="rl"))
    principal = keys.authenticate(f"Bearer {made.key}")
    assert (principal.key_id, principal.project, principal.admin) == (made.info.id, "rl", False)
    assert keys.authenticate(f"bearer  {made.key} ").project == "rl"


async def test_a_key_without_project_gets_one_of_its_own(keys: Keys) -> None:
    first, second = [await keys.create(KeyRequest(name="x")) for _ in range(2)]
    assert first.info.project != second.info.project


async def test_missing_malformed_unknown_wrong_expired_and_revoked_keys_hear_the_same_words(keys: Keys, clock: Clock) -> None:
    expiring = await keys.create(KeyRequest(name="short", expires_in_s=10))
    revoked = await keys.create(KeyRequest(name="gone"))
    good = await keys.create(KeyRequest(name="good"))
    await keys.revoke(revoked.info.id)
    wrong = good.key[:-4] + ("aaaa" if not good.key.endswith("aaaa") else "bbbb")
    assert keys.authenticate(f"Bearer {expiring.key}")
    clock.now += 10
    tried = [None, "", "Bearer", "Bearer x", f"Basic {good.key}", f"Bearer {mint().text}", f"Bearer {wrong}"]
    tried += [f"Bearer {expiring.key}", f"Bearer {revoked.key}", f"Bearer {good.key}\u00e9"]
    assert len({refusal(keys, authorization) for authorization in tried}) == 1


async def test_a_revocation_counts_at_once_and_after_a_restart(keys: Keys, store: Store) -> None:
    made = await keys.create(KeyRequest(name="x"))
    await keys.revoke(made.info.id)
    refusal(keys, f"Bearer {made.key}")
    reopened = Keys(store)
    await reopened.open()
    refusal(reopened, f"Bearer {made.key}")


async def test_revoking_twice_answers_the_same_record(keys: Keys, clock: Clock) -> None:
    made = await keys.create(KeyRequest(name="x"))
    first = await keys.revoke(made.info.id)
    clock.now += 60
    assert await keys.revoke(made.info.id) == first
    with pytest.raises(NotFound):
        await keys.revoke("nokey")


async def test_keys_live_across_a_restart(keys: Keys, store: Store) -> None:
    made = await keys.create(KeyRequest(name="x", project="rl", admin=True))
    reopened = Keys(store)
    await reopened.open()
    assert reopened.authenticate(f"Bearer {made.key}").admin
    assert reopened.infos() == keys.infos()


async def test_the_store_never_holds_a_secret(keys: Keys, tmp_path: Path) -> None:
    made = await keys.create(KeyRequest(name="x"))
    secret = made.key.rpartition("_")[2].encode()
    held = b"".join(path.read_bytes() for path in files(tmp_path))
    assert made.info.id.encode() in held
    assert secret not in held


async def test_the_store_is_readable_by_its_owner_only(keys: Keys, tmp_path: Path) -> None:
    await keys.create(KeyRequest(name="x"))
    assert {path.stat().st_mode & 0o777 for path in files(tmp_path)} == {0o600}


async def test_the_store_uses_a_write_ahead_log(store: Store, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "store.sqlite") as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


async def test_a_repeated_create_gives_the_same_key_id_and_a_secret_that_works(keys: Keys) -> None:
    first = await keys.create(KeyRequest(name="x"), idempotency_key="k1:once")
    again = await keys.create(KeyRequest(name="x"), idempotency_key="k1:once")
    other = await keys.create(KeyRequest(name="x"), idempotency_key="k1:twice")
    assert again.info.id == first.info.id != other.info.id
    assert keys.authenticate(f"Bearer {again.key}").key_id == first.info.id
    refusal(keys, f"Bearer {first.key}")


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (KeyRequest(name=" "), "name"),
        (KeyRequest(name="x" * 201), "name"),
        (KeyRequest(name="x", project="Ab"), "project"),
        (KeyRequest(name="x", expires_in_s=0), "expires_in_s"),
        (KeyRequest(name="x", expires_in_s=float("nan")), "expires_in_s"),
    ],
)
async def test_a_key_request_that_makes_no_sense_is_refused_by_field(keys: Keys, request_: KeyRequest, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await keys.create(request_)
    assert caught.value.field == field


async def test_the_first_key_is_taken_only_by_an_empty_store(keys: Keys) -> None:
    first, late = mint(), mint()
    assert await keys.plant_first(first.seed)
    assert await keys.plant_first(first.seed), "a restarted service with the same arguments says the same"
    assert not await keys.plant_first(late.seed)
    assert keys.authenticate(f"Bearer {first.text}").admin
    refusal(keys, f"Bearer {late.text}")


async def test_the_local_key_is_replaced_by_the_next_run_and_leaves_others_alone(keys: Keys, store: Store) -> None:
    first, one, two = mint(), mint(), mint()
    await keys.plant_local(one.seed)
    assert await keys.plant_first(first.seed), "a local key doesn't make the store used"
    await keys.plant_local(two.seed)
    refusal(keys, f"Bearer {one.text}")
    for key in (first, two):
        assert keys.authenticate(f"Bearer {key.text}").project == "default"
    reopened = Keys(store)
    await reopened.open()
    assert {info.id for info in reopened.infos()} == {first.seed.id, two.seed.id}
