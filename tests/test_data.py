"""The data of the tests: nothing changes unnoticed, and an independent reader expands it."""

import numpy as np
import pytest

from tests.data.quantised.check import check
from tests.support import DATA, bundled_reference
from tests.support.data_digests import COMMAND, compute_digests, describe_changes, write_digests

QUANTISED = sorted(path.parent.name for path in DATA.glob("quantised/*/reference.npz"))
QUANTISED.remove("base-bf16")  # the weights before quantisation
# Maximum size of the folder in bytes.
MAX_BYTES = 6_000_000


def test_no_file_differs_from_its_digest() -> None:
    changes = "; ".join(describe_changes())
    assert not changes, f"in tests/data, {changes}. If this is intended, run: {COMMAND}"


def test_changes_of_files_are_found(tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "one").write_bytes(b"1")
    (tmp_path / "two").write_bytes(b"2")
    write_digests(tmp_path)
    assert (tmp_path / "SHA256SUMS").read_text(encoding="utf-8") == (
        "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b  folder/one\n"
        "d4735e3a265e16eee03f59718b9b5d03019c07d8b6c51f90da3a666eec13ab35  two\n"
    )
    assert describe_changes(tmp_path) == []
    (tmp_path / "folder" / "one").write_bytes(b"0")
    (tmp_path / "two").rename(tmp_path / "three")
    changes = ["two is missing", "three has no digest", "folder/one has changed"]
    assert describe_changes(tmp_path) == changes


def test_the_folder_is_small() -> None:
    sizes = {name: (DATA / name).stat().st_size for name in compute_digests()}
    assert sum(sizes.values()) <= MAX_BYTES, sorted(sizes, key=sizes.__getitem__)[-5:]


@pytest.mark.parametrize("name", QUANTISED)
def test_an_independent_reader_expands_quantised_weights(name) -> None:
    """The weights equal those of the tool that wrote the folder, which are in reference.npz."""
    found = check(DATA / "quantised" / name)
    assert len(found) >= 2
    assert [weight for weight, is_equal in found.items() if not is_equal] == []


def test_there_are_26_quantised_formats() -> None:
    assert len(QUANTISED) == 26


@pytest.mark.slow
@pytest.mark.peers
def test_transformers_gives_the_stored_values_of_the_bundled_model() -> None:
    pytest.importorskip("transformers")
    tokens, logits = bundled_reference.compute()
    assert tokens == bundled_reference.read_json()
    with np.load(bundled_reference.FOLDER / "logits.npz") as stored:
        assert stored.keys() == logits.keys()
        for name, array in logits.items():
            np.testing.assert_allclose(array, stored[name], rtol=0, atol=2e-5, err_msg=name)
