"""Test of examples/equinox_model.py."""

import pytest


@pytest.mark.peers
def test_example_decodes_as_the_plain_forward_pass_with_a_shared_prompt(capsys) -> None:
    from examples import equinox_model

    equinox_model.main()
    lines = capsys.readouterr().out.splitlines()
    # The prompt of 20 tokens has 3 blocks. Both continuations keep 2 of them.
    assert "3 of 16 blocks of 8 tokens in use, lengths [20, 20]" in lines[0]
    [end] = [line for line in lines if line.startswith("at the end")]
    assert "6 of 16 blocks of 8 tokens in use, lengths [30, 30]" in end
    # The first two blocks are shared, the next four are not.
    assert lines[-1].endswith("221111..........")
