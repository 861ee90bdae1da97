"""Backend ``"mosaic_tpu"`` for TPUs: Pallas kernels, compiled by Mosaic. XLA does the writes."""
