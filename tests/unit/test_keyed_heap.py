"""KeyedHeap against sorting, and DueTimes against looking at every request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nereid.scheduling.due_times import DueTimes
from nereid.scheduling.keyed_heap import KeyedHeap
from nereid.scheduling.request_state import RequestState
from tests.unit.scheduler_steps import make_request

QUEUE_TIMEOUT_S = 5.0


@given(st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(-3, 3)), max_size=80))
def test_a_keyed_heap_finds_the_least_key(operations: list[tuple[int, int | None]]) -> None:
    """Operations: put an item with a key, or discard it where the key is None."""
    heap: KeyedHeap[int, int] = KeyedHeap()
    keys: dict[int, int] = {}
    for item, key in operations:
        if key is None:
            heap.discard(item)
            keys.pop(item, None)
        else:
            heap.put(item, key)
            keys[item] = key
        least = heap.least()
        assert (least is None) == (not keys)
        assert least is None or keys[least] == min(keys.values())
        assert set(heap) == set(keys) and len(heap) == len(keys) and (item in heap) == (item in keys)
        assert {item: heap.key_of(item) for item in heap} == keys


def test_of_equal_keys_the_earliest_put_is_least() -> None:
    heap: KeyedHeap[str, int] = KeyedHeap()
    for item in "cab":
        heap.put(item, 1)
    heap.put("a", 1)
    order = []
    while least := heap.least():
        order.append(least)
        heap.discard(least)
    assert order == ["c", "a", "b"]


def test_a_keyed_heap_keeps_no_more_than_its_items_need() -> None:
    heap: KeyedHeap[int, int] = KeyedHeap()
    for number in range(10_000):
        heap.put(number % 10, number)
    assert len(heap._heap) <= 2 * 10 + 8
    for number in range(10):
        heap.discard(number)
    assert len(heap._heap) <= 8 and heap.least() is None


@st.composite
def lives(draw: st.DrawFn) -> tuple[float, float | None, float | None, float]:
    """A request's times: arrival, deadline, when it is first scheduled, when it ends."""
    arrival = draw(st.integers(0, 20))
    deadline = draw(st.none() | st.integers(0, 12).map(lambda after: arrival + after))
    scheduled = draw(st.none() | st.integers(0, 8).map(lambda after: arrival + after))
    return arrival, deadline, scheduled, arrival + draw(st.integers(1, 30))


@given(st.lists(lives(), max_size=12))
def test_due_times_find_exactly_the_overdue(times: list[tuple[float, float | None, float | None, float]]) -> None:
    due_times = DueTimes(QUEUE_TIMEOUT_S)
    states: dict[RequestState, tuple[float | None, float | None, float]] = {}
    for now in range(60):
        for arrival, deadline, scheduled, end in times:
            if arrival == now:
                request = make_request(len(states), 1, at=arrival, deadline=deadline)
                state = RequestState(request, 0, (arrival, 0), 1)
                states[state] = (deadline, scheduled, end)
                due_times.watch(state)
        for state, (_, scheduled, end) in list(states.items()):
            state.known_to_executor = scheduled is not None and scheduled <= now
            if end == now:
                due_times.forget(state)
                del states[state]
        overdue = {
            state
            for state, (deadline, _, _) in states.items()
            if (deadline is not None and deadline <= now)
            or (not state.known_to_executor and now >= state.request.arrival_time + QUEUE_TIMEOUT_S)
        }
        assert set(due_times.expired(now)) == overdue
        for state in overdue:
            del states[state]
