from dayplan import free_slots

DAY = (540, 1020)


def test_an_empty_day_is_one_slot() -> None:
    assert free_slots([], day=DAY, minimum=30) == [DAY]


def test_short_gaps_are_left_out() -> None:
    assert free_slots([(550, 700), (720, 1015)], day=DAY, minimum=30) == []


def test_a_gap_exactly_as_long_as_asked_counts() -> None:
    assert free_slots([(600, 660), (720, 1020)], day=DAY, minimum=60) == [(540, 600), (660, 720)]


def test_the_rest_of_the_day_counts_if_exactly_as_long_as_asked() -> None:
    assert free_slots([(540, 990)], day=DAY, minimum=30) == [(990, 1020)]
