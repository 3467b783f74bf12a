"""`qerl explain`: every key has help, another project's name is understood."""

from __future__ import annotations

import pytest

from qerl.config import recipe_keys, section_of
from qerl.errors import QerlError
from qerl.explain import explain


def test_every_key_has_a_description_and_an_explanation():
    everything = explain()
    for name, field in recipe_keys().items():
        assert field.description and len(field.description) >= 8, name
        assert field.description in everything
        if section_of(field) is None:
            assert f"\n{name}: " in f"\n{everything}", name


def test_explain_one_key_section_and_alias():
    assert explain("train.lr_end") == (
        "train.lr_end: a number, ≥ 0, ≤ 1\n"
        "    default: 0.0\n"
        "    Where the decay ends, just after the last step, as a fraction of lr."
    )
    assert "one of nvfp4, nf4, bf16" in explain("format")
    assert "default: none, must be given" in explain("model")
    assert explain("lora").startswith(
        "lora: The trained adapter.\n\nlora.rank: a whole number, ≥ 1"
    )
    assert explain("num_generations").startswith(
        "num_generations: in qerl it is `rollout.group_size`\n\nrollout.group_size: a whole number"
    )
    assert explain("beta").startswith("beta: qerl has no KL penalty")
    assert explain("task.solved_at").startswith(
        "task.solved_at: a number or null\n    default: null\n    A greedy answer counts as right"
    )
    assert "(null: all, 0: none)" in explain("output.log_completions")


def test_explain_unknown_key():
    with pytest.raises(QerlError, match="`train.stps`: unknown key; did you mean `train.steps`"):
        explain("train.stps")
