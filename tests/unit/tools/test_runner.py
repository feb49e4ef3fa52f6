"""The runner of the benchmarks: the order of turns, what it leaves out, and when a clock starts."""

from __future__ import annotations

from megatron_lab.benchmarks.runner import make_timer, run_in_turns, run_pair_in_turns


def test_turns_go_forwards_and_backwards_after_one_to_warm_up() -> None:
    order: list[str] = []

    def measurement(name: str) -> int:
        order.append(name)
        return len(order)

    found = run_in_turns({name: lambda name=name: measurement(name) for name in "abc"}, 2)  # type: ignore[misc]
    assert "".join(order) == "abc" + "cba" + "abc"
    assert found == {"a": [6, 7], "b": [5, 8], "c": [4, 9]}
    order.clear()
    begun: list[int] = []
    run_in_turns({"a": lambda: 0.0}, 2, lambda: begun.append(len(begun)))
    assert begun == [0, 1, 2], "before each turn, that to warm up included"
    assert run_pair_in_turns(lambda: measurement("a"), lambda: measurement("b"), 1) == ([4], [3])


def test_what_an_action_waits_for_is_not_timed() -> None:
    order: list[str] = []
    assert make_timer(lambda: order.append("action"), lambda: order.append("ready"))() >= 0.0
    assert order == ["ready", "action"]
