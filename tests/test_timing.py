import pytest

from lib.workbench.step import host_saving
from lib.workbench.timing import Range, Timing, measure, ratio


def test_rounds_alternate_their_order_and_warm_up_is_left_out():
    order = []
    ways = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    timings = measure(ways, rounds=2, calls=1, warmup=1)
    assert "".join(order) == "ab" + "ba" + "ab"
    assert [(len(timing.host_us), timing.gpu_us) for timing in timings.values()] == [(2, ()), (2, ())]


def test_what_is_compared_is_compared_inside_rounds():
    # A neighbour that slows a whole round tenfold leaves the ratio alone.
    assert ratio(Timing("a", (2.0, 20.0, 2.0)), Timing("b", (1.0, 10.0, 1.0))) == 2.0
    saved = host_saving(Timing("before", (5.0, 9.0, 7.0)), Timing("after", (4.0, 4.0, 4.0)))
    assert (saved.middle, saved.low, saved.high) == (3, 2, 4)


@pytest.mark.parametrize(
    ("number", "text", "clear"),
    [
        (Range(53.2, 3.42, 79.8), "53 µs (3.4 to 80)", True),
        (Range(0.25, -0.5, 1, " tokens"), "0.25 tokens (-0.5 to 1)", False),
        (Range(-11, -34, -0.3), "-11 µs (-34 to -0.3)", True),  # no -0
    ],
)
def test_a_range_says_so_and_whether_it_is_a_claim(number, text, clear):
    assert (str(number), number.clear) == (text, clear)
