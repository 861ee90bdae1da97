"""Gradients, checkpoints and weight updates of every family, compared with transformers.

The families are `tests.support.families.CASES`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import Engine
from paged_jax.models.decoder import Decoder
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.loading.huggingface import load_weights
from paged_jax.models.loading.orbax import save_checkpoint
from tests.support import families
from tests.support.families import CASES, VOCAB_SIZE, WINDOW

# Importing torch and transformers takes seconds.
pytestmark = [pytest.mark.slow, pytest.mark.peers]

LENGTH = WINDOW + 4
TOKENS = np.random.default_rng(0).integers(2, VOCAB_SIZE, (1, LENGTH + 1), np.int32)


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """Return the model of transformers, and its folder."""
    folder = tmp_path_factory.mktemp("theirs")
    model = families.reference(CASES[request.param])
    model.save_pretrained(folder)
    return model, folder


def load(folder, **options) -> Decoder:
    return load_weights(Decoder, folder, LlamaConfig.from_file(folder), **options)


def leaves(model: Decoder) -> dict[str, np.ndarray]:
    pairs, _ = jax.tree_util.tree_flatten_with_path(nnx.state(model))
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in pairs}


@nnx.jit
def loss_and_gradients(model: Decoder, token_ids: jax.Array):
    def loss(model):
        logprobs = jax.nn.log_softmax(model(token_ids[:, :-1]))
        return -jnp.take_along_axis(logprobs, token_ids[:, 1:, None], axis=-1).mean()

    return nnx.value_and_grad(loss)(model)


def test_gradients_match_transformers(case, tmp_path) -> None:
    """The gradients of transformers are saved and loaded as weights, to rename and fuse them."""
    theirs, folder = case
    torch = families.torch()
    ours, gradients = loss_and_gradients(load(folder), jnp.asarray(TOKENS))
    theirs.zero_grad()
    logits = theirs(torch.from_numpy(TOKENS[:, :-1]).long()).logits[0]
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(TOKENS[0, 1:]).long())
    loss.backward()
    assert abs(float(ours) - loss.item()) < 1e-5
    weights = {name: parameter.detach().clone() for name, parameter in theirs.named_parameters()}
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0 if parameter.grad is None else parameter.grad)
        theirs.save_pretrained(tmp_path)
        for name, parameter in theirs.named_parameters():
            parameter.copy_(weights[name])
    expected = leaves(load(tmp_path))
    actual, _ = jax.tree_util.tree_flatten_with_path(gradients)
    config = load(folder).config
    # These are buffers in transformers, and get no gradient there.
    not_trained = {
        name
        for spec in config.layers
        for name, parameter in spec.parameters(config.hidden_size).items()
        if not parameter.is_trained
    }
    assert len(actual) == len(expected)
    for path, gradient in actual:
        wanted = expected[jax.tree_util.keystr(path)]
        if any(f"'{name}'" in str(path) for name in not_trained):
            continue
        scale = np.abs(wanted).max()
        assert scale > 0, path
        np.testing.assert_allclose(gradient, wanted, rtol=0, atol=1e-4 * scale, err_msg=str(path))


def test_save_checkpoint_is_inverse_to_from_pretrained(case, tmp_path) -> None:
    model = load(case[1])
    save_checkpoint(model, tmp_path / "checkpoint")
    same = Decoder.from_pretrained(tmp_path / "checkpoint", scan_layers=model.scan_layers)
    assert same.config == model.config
    jax.tree.map(np.testing.assert_array_equal, leaves(same), leaves(model))


def test_update_params_accepts_hugging_face_names(case) -> None:
    theirs, folder = case
    model = load(folder)
    engine = Engine(model, block_size=8, num_blocks=16, max_num_seqs=1)
    tensors = {name: 2 * x.detach().numpy() for name, x in theirs.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    engine.update_params(tensors, mapping={})
    for new, (name, old) in zip(engine.weights, leaves(model).items(), strict=True):
        np.testing.assert_array_equal(new, 2 * old, err_msg=name)
