"""Which layers of a chain become one, and which globs keep what out."""

from __future__ import annotations

import pytest

from dsec.edge.leftovers import GLOBS_MAX, LEFTOVERS, Exclusion
from dsec.images.packing import DIFF_LAYERS_MAX, still_many, to_merge
from libdsec.errors import InvalidArgument
from libdsec.schema import LayerInfo, Leftover


def layers(kinds: str) -> list[LayerInfo]:
    """Lowest first: ``b`` of an image, ``d`` a diff, ``c`` a diff that isn't whole on the node."""
    return [
        LayerInfo(digest=f"sha256:{number}", blob="cold" if kind == "c" else None, meta_bytes=1, blob_bytes=0, diff=kind != "b")
        for number, kind in enumerate(kinds)
    ]


def merged(kinds: str) -> tuple[int, int] | None:
    span = to_merge(layers(kinds), lambda layer: layer.blob != "cold")
    return None if span is None else (span.start, span.stop)


def test_few_diffs_stay_as_they_are() -> None:
    assert merged("b") is None
    assert merged("bb" + "d" * DIFF_LAYERS_MAX) is None


def test_one_diff_too_many_makes_all_neighbours_one() -> None:
    assert merged("bb" + "d" * (DIFF_LAYERS_MAX + 1)) == (2, DIFF_LAYERS_MAX + 3)


def test_only_neighbours_become_one() -> None:
    assert merged("bddbdddddddd") == (4, 12)
    assert merged("bddddddddbdd") == (1, 9)
    assert merged("bdddddbddddd") == (7, 12), "of two alike the topmost: images on top of it share the lower one"


def test_layers_that_are_not_here_are_left_alone() -> None:
    assert merged("bddddcddddd") == (6, 11)
    assert merged("b" + "dc" * 5) is None


def test_what_is_here_may_not_be_enough() -> None:
    chain = layers("bddddcddddd")
    assert not still_many(chain, to_merge(chain, lambda layer: layer.blob != "cold")), "five became one, so six are left"
    scattered = layers("b" + "dc" * 5)
    assert still_many(scattered, None)
    assert not still_many(scattered, to_merge(scattered, lambda layer: True))
    assert not still_many(layers("bdd"), None)


def test_a_glob_of_homes_is_told_as_it_was_given() -> None:
    exclusion = Exclusion(["~/x", "/a/**"], leftovers=False)
    assert exclusion.globs == ("/root/x", "/home/*/x", "/a/**")
    told = exclusion.told([(1, 10), (2, 20), (0, 0)])
    assert told == (Leftover(glob="~/x", entries=3, bytes=30),)


def test_leftovers_come_behind_a_requests_own_globs() -> None:
    exclusion = Exclusion(["*.log"], leftovers=True)
    assert exclusion.globs[0] == "*.log" and len(exclusion.globs) > len(LEFTOVERS)
    assert Exclusion([], leftovers=False).globs == ()


@pytest.mark.parametrize("exclude", [[""], ["/"], ["a\0b"], ["x" * 901], ["a"] * (GLOBS_MAX + 1)])
def test_what_is_no_glob_is_refused(exclude: list[str]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Exclusion(exclude, leftovers=True)
    assert caught.value.field == "exclude"
