"""Tests of the explanation of waits and preemptions in a response."""

from paged_jax.scheduler.outputs import (
    Explanation,
    PreemptionNote,
    RequestMetrics,
    RequestOutput,
    Wait,
)
from paged_jax.server.writer import explanation

MINE, OTHER = "cmpl-00-0", "cmpl-ff-0"


def output_of(told: Explanation | None) -> RequestOutput:
    return RequestOutput(MINE, None, [1], [], True, RequestMetrics(0.0), explanation=told)


def test_explanation_hides_ids_of_other_requests() -> None:
    told = Explanation(
        waits=[Wait("same prefix", 0.0, 1.0, other_request=OTHER)],
        preemptions=[
            PreemptionNote(
                2.0, "recompute", 7, reason="priority", numbers={"priority": 1},
                other_request=OTHER, spared_request=MINE, advantage="index",
            ),
        ],
        num_cached_tokens=0,
        prefix_match=None,
    )  # fmt: skip
    got = explanation(output_of(told))
    assert got is not None and OTHER not in repr(got)
    assert got["waits"][0]["detail"] == "another request was computing the same prefix"
    detail = got["preemptions"][0]["detail"]
    assert (
        detail.startswith("another request arrived") and f"before request {MINE} because" in detail
    )


def test_explanation_has_the_fields_of_its_schema() -> None:
    told = Explanation([Wait("slots", 0.0, 1.0, numbers={"num_slots": 4}, sample=1)], [], 16, "all")
    assert explanation(output_of(told)) == {
        "waits": [
            {
                "reason": "slots",
                "start": 0.0,
                "seconds": 1.0,
                "detail": "no slot of 4 was free",
                "sample": 1,
            }
        ],
        "preemptions": [],
        "num_cached_tokens": 16,
        "prefix_match": "all",
    }


def test_explanation_is_none_if_not_requested() -> None:
    assert explanation(output_of(None)) is None
