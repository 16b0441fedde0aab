from dayplan import merge


def test_overlapping_intervals_become_one() -> None:
    assert merge([(540, 600), (570, 660)]) == [(540, 660)]


def test_touching_intervals_become_one() -> None:
    assert merge([(540, 600), (600, 660)]) == [(540, 660)]


def test_an_interval_inside_another_disappears() -> None:
    assert merge([(540, 700), (570, 600)]) == [(540, 700)]
