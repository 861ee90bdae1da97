"""Tests that both decode steps of `benchmarks.generate` make the same tokens."""

from benchmarks.generate.__main__ import PROMPT_LEN, DecodeStep
from paged_jax import Llama


def test_the_paged_step_and_the_contiguous_one_give_the_same_tokens(tiny_folder) -> None:
    models = (Llama.from_pretrained(tiny_folder, scan_layers=paged) for paged in (True, False))
    paged, contiguous = (
        DecodeStep(model, batch=2, max_len=PROMPT_LEN + 8, is_paged=is_paged)
        for model, is_paged in zip(models, (True, False), strict=True)
    )
    for _ in range(4):
        assert paged.step().tolist() == contiguous.step().tolist()
