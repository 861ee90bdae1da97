"""Fairness between clients: they take turns for slots."""

import random
from collections import Counter

import pytest

from paged_jax.scheduler.queue import FairQueue
from paged_jax.scheduler.scheduler import Scheduler
from tests.support.fake_memory import FakeEngine, make_request


def test_fair_queue_orders_clients_by_turns() -> None:
    running = make_request(0, [1], max_tokens=4, client="a")
    queue = FairQueue(running.sequences)
    requests = [
        make_request(number, [1], max_tokens=4, client=client, priority=priority)
        for number, (client, priority) in enumerate(
            [("a", 0), ("a", 0), ("b", 0), ("b", 0), ("c", 1), ("a", -1), ("b", 0)], start=1
        )
    ]
    first, second, third, fourth, fifth, sixth, last = (r.sequences[0] for r in requests)
    for request in requests[::-1]:
        queue.add(request.sequences[0])
    # Client a has one running sequence, and its sixth request comes before its first.
    assert list(queue) == [sixth, third, fourth, first, last, second, fifth]
    queue.remove(fourth)
    assert fourth not in queue and third in queue and len(queue) == 6
    assert list(queue) == [sixth, third, last, first, second, fifth]
    for sequence in list(queue):
        queue.remove(sequence)
    assert not queue and list(queue) == []


@pytest.mark.parametrize("seed", range(5))
def test_late_client_gets_the_next_slots(seed: int) -> None:
    """A long queue of a client does not delay another client; then both use equally many slots."""
    rng = random.Random(seed)
    num_slots = rng.randint(2, 6)
    scheduler = Scheduler(num_slots, 400, 4, max_num_batched_tokens=64, max_chunk=16)
    engine = FakeEngine(scheduler, num_slots, eos=None)

    def add(client: str, count: int) -> list:
        added = []
        for _ in range(count):
            prompt = [rng.randrange(1, 23) for _ in range(rng.randint(1, 20))]
            tokens = rng.randint(3, 20)
            request = make_request(len(all_requests), prompt, max_tokens=tokens, client=client)
            all_requests.append(request)
            scheduler.add(request.sequences)
            added.append(request.sequences[0])
        return added

    all_requests: list = []
    greedy = add("greedy", 40)
    while len(engine.finished) < 3:
        engine.step()
    late = add("late", 12)
    while any(s in scheduler.waiting for s in late):
        queued, num_finished = set(scheduler.waiting), len(engine.finished)
        engine.step()
        ran = [*scheduler.running, *engine.finished[num_finished:]]
        if queued & {s for s in ran if s in greedy}:
            counts = Counter("greedy" if s in greedy else "late" for s in ran)
            assert counts["greedy"] <= counts["late"] + 1
    assert any(s in scheduler.waiting for s in greedy)
    engine.run()
