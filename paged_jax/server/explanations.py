"""`explanation`: why a request waited or was preempted, without the names of other requests."""

from paged_jax.scheduler.explain import describe_preemption, describe_wait, name_request
from paged_jax.scheduler.outputs import RequestOutput
from paged_jax.server import schemas


def explanation(output: RequestOutput) -> schemas.Explanation | None:
    """The explanation of a request for its client; None if it was not asked for.

    Its sentences call other requests "another request": their ids belong to other clients.
    """
    explanation = output.explanation
    if explanation is None:
        return None

    def name(request_id: str) -> str:
        return name_request(request_id) if request_id == output.request_id else "another request"

    return {
        "waits": [
            {
                "reason": wait.reason,
                "start": wait.start,
                "seconds": wait.seconds,
                "detail": describe_wait(wait, name),
                "sample": wait.sample,
            }
            for wait in explanation.waits
        ],
        "preemptions": [
            {
                "seconds": note.seconds,
                "kind": note.kind,
                "num_tokens": note.num_tokens,
                "detail": describe_preemption(note, name),
                "sample": note.sample,
            }
            for note in explanation.preemptions
        ],
        "num_cached_tokens": explanation.num_cached_tokens,
        "prefix_match": explanation.prefix_match,
    }
