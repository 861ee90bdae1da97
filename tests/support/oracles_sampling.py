"""Sampling of one row at a time, in float64, with plain sorting."""

import numpy as np


def penalised_logits(
    logits,
    *,
    prompt=(),
    output=(),
    bias=None,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
):
    """Apply bias, then the three penalties, to a row [V]."""
    z = np.asarray(logits, np.float64).copy()
    for token, value in (bias or {}).items():
        z[token] += value
    for token in set(prompt) | set(output):
        z[token] = z[token] / repetition_penalty if z[token] > 0 else z[token] * repetition_penalty
    for token in output:
        z[token] -= frequency_penalty
    for token in set(output):
        z[token] -= presence_penalty
    return z


def kept_probabilities(logits, *, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0):
    """Return the distribution after all filters, f64[V], with 0 for removed tokens."""
    z = np.asarray(logits, np.float64)
    weights = np.exp((z - z.max()) / temperature)
    kept = (weights >= min_p) & np.isfinite(z)
    # In descending order, ties by id. lexsort sorts by its last key first.
    order = np.lexsort((np.arange(len(z)), -z))
    order = order[kept[order]]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        mass = np.cumsum(weights[order])
        num_kept = 1 + np.searchsorted(mass, top_p * mass[-1])
        order = order[:num_kept]
    probabilities = np.zeros(len(z))
    probabilities[order] = weights[order] / weights[order].sum()
    return probabilities


def log_softmax(logits):
    """Compute the log-softmax of a row [V]."""
    z = np.asarray(logits, np.float64)
    shifted = z - z.max()
    return shifted - np.log(np.exp(shifted).sum())
