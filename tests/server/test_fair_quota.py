"""Fair quotas of clients."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from paged_jax import Engine
from paged_jax.server import Limits, Settings
from paged_jax.server.api_error import ApiError
from paged_jax.server.fair_quota import FairQuota
from tests.support.live_server import LiveServer, bearer, error_of, wait_until
from tests.support.tiny_model import SIZES


def test_fair_quota_gives_each_client_a_share() -> None:
    quota = FairQuota("samples", limit="max_queue", num_places=12)
    with quota.take("greedy", 12):
        assert quota.is_full and not quota.has_room("greedy", 1)
        with quota.take("late", 6), pytest.raises(ApiError) as refused, quota.take("late", 1):
            pass
        message = "There are 18 samples already, 6 of them yours, and 1 more would exceed the 12"
        assert str(refused.value).startswith(message) and refused.value.status == 429
        # With more clients, each client has a smaller share.
        with quota.take("late", 5), quota.take("third", 4):
            assert not quota.has_room("late", 1) and not quota.has_room("third", 1)
            assert quota.has_room("fourth", 3) and not quota.has_room("fourth", 4)
        assert quota.has_room("third", 6), "clients without places are not counted"
    assert quota.total == 0 and quota.has_room("late", 12)


def test_client_with_many_requests_delays_no_other_client(tiny_folder) -> None:
    room = 40
    settings = Settings(
        model_name="tiny",
        limits=Limits(max_queue=room - SIZES["max_num_seqs"], max_streams=2),
        api_keys=("greedy", "late"),
    )
    flood = {"prompt": ["the cat"] * room, "max_tokens": 50, "ignore_eos": True, "seed": 1}
    short = {"prompt": "ab", "max_tokens": 2, "temperature": 0}
    with (
        LiveServer(Engine(tiny_folder, **SIZES), settings) as server,
        ThreadPoolExecutor(1) as pool,
    ):

        def post(key: str, body: dict):
            return server.post("/v1/completions", body, headers=bearer(key))

        def num_waiting() -> int:
            metrics = server.get("/metrics", headers=bearer("late")).text.splitlines()
            [line] = [each for each in metrics if each.startswith("vllm:num_requests_waiting{")]
            return int(float(line.rsplit(" ", 1)[1]))

        assert post("late", short).status_code == 200
        answer = pool.submit(post, "greedy", flood)
        wait_until(lambda: num_waiting() >= room - SIZES["max_num_seqs"])
        assert server.service.num_active == room
        assert post("late", short).status_code == 200
        assert num_waiting() > 4, "with a single queue it would have been the last"
        message = error_of(post("greedy", short), 429)["message"]
        assert message.startswith(f"There are {room} samples already, {room} of them yours, and 1")
        message = error_of(post("late", {**short, "prompt": ["ab"] * 21}), 429)["message"]
        assert f"{room} samples already, 0 of them yours, and 21 more" in message
        message = error_of(post("late", {**short, "prompt": ["ab"] * (room + 1)}), 400)["message"]
        assert f"must be at most {room}" in message, "it could never be admitted"
        assert answer.result().status_code == 200
        wait_until(lambda: server.service.num_active == 0)
