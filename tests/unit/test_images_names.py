"""What images may be called, and what a reference means."""

from __future__ import annotations

import pytest

from dsec.images.names import ByDigest, ByName, check_name, parse_reference
from libdsec.errors import InvalidArgument

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    "name", ["a", "python:3.11", "registry.../sphinx-9658:official", "localhost:5000/team/x:v1", "UPPER_case", "...", "größe", "n" * 255]
)
def test_registry_like_names_are_taken(name: str) -> None:
    assert check_name(name) == name
    assert parse_reference(name) == ByName(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "n" * 256,
        "a b",
        "a\nb",
        "a\0b",
        "a\x7fb",
        "a\u200bb",
        "a@1",
        "@",
        DIGEST,
        "SHA256:x",
        "/a",
        "a/",
        "a//b",
        "..",
        ".",
        "a/./b",
        "../a",
        "a\ud800",
    ],
)
def test_other_names_are_refused_by_field(name: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        check_name(name)
    assert refusal.value.field == "name"


def test_a_version_is_a_positive_number_after_the_at_sign() -> None:
    assert parse_reference("a:b@3") == ByName("a:b", 3)
    for text in ("a@", "a@0", "a@-1", "a@x", "a@1@2", "@1", "", "a@01", "a@1\n", "a@" + "9" * 10):
        assert parse_reference(text) is None, text


def test_a_digest_is_no_name() -> None:
    assert parse_reference(DIGEST) == ByDigest(DIGEST)
    assert parse_reference(DIGEST + "0") == ByName(DIGEST + "0")
