import pytest

from lib.workbench.timing import Timing, measure, quartiles, ratio


def busy(n):
    return lambda: sum(range(n))


def test_every_round_gives_each_way_one_sample():
    seen = []
    timings = measure({"a": busy(10), "b": busy(10)}, rounds=7, calls=3, on_round=lambda: seen.append(1))
    assert [len(t.host_us) for t in timings.values()] == [7, 7]
    assert len(seen) == 7
    assert all(t.gpu_us == () for t in timings.values())


def test_ten_times_the_work_takes_several_times_as_long():
    timings = measure({"small": busy(2_000), "large": busy(20_000)}, rounds=15, calls=10)
    assert ratio(timings["large"], timings["small"]) > 3


def test_rounds_alternate_their_order_and_warm_up_comes_first():
    order = []
    ways = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    measure(ways, rounds=2, calls=1, warmup=1)
    assert "".join(order) == "ab" + "ab" + "ba"


def test_ratio_is_formed_inside_rounds():
    # A neighbour that slows a whole round tenfold leaves the ratio alone.
    assert ratio(Timing("a", (2.0, 20.0, 2.0)), Timing("b", (1.0, 10.0, 1.0))) == 2.0


def test_quartiles_hold_the_middle_half():
    assert quartiles((1.0, 2.0, 3.0, 4.0, 100.0)) == (2.0, 4.0)
    assert quartiles((5.0,)) == (5.0, 5.0)


@pytest.mark.parametrize("bad", [{"ways": {}}, {"rounds": 0}, {"calls": 0}])
def test_nothing_to_measure_is_an_error(bad):
    with pytest.raises(ValueError, match="expected ways, rounds and calls"):
        measure(**({"ways": {"a": busy(1)}} | bad))
