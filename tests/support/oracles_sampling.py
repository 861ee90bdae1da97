"""What sampling means, one row at a time, in float64 and with plain sorting."""

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
    """Bias, then the three penalties, of one row [V]."""
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
    """The distribution after all filters, f64[V]; 0 for tokens that are dropped."""
    z = np.asarray(logits, np.float64)
    weights = np.exp((z - z.max()) / temperature)
    kept = (weights >= min_p) & np.isfinite(z)
    # Largest first; equal ones by id. Stable, so lexsort's last key decides first.
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
    """Of one row [V]."""
    z = np.asarray(logits, np.float64)
    shifted = z - z.max()
    return shifted - np.log(np.exp(shifted).sum())
