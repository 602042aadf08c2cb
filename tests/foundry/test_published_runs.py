"""Plans of published runs: none that fitted is refused, and none that ran out of memory is accepted."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from published import OUT_OF_MEMORY, PAGE, Published, Row, all_rows, page, plan_mpt, published, refused

from composer_fsdp2.estimate.step import Kind
from composer_fsdp2.preflight.planned import StepOptions, plan_step
from composer_fsdp2.preflight.read_run import read_run

# From LLM Foundry's tables, at 2,048 tokens.
PARAMETERS = {
    "MPT 125M": 125_311_488,
    "MPT 350M": 355_985_408,
    "MPT 760M": 760_470_528,
    "MPT 1B": 1_315_950_592,
    "MPT 3B": 2_651_837_440,
    "MPT 7B": 6_658_859_008,
    "MPT 13B": 12_853_954_560,
    "MPT 30B": 29_975_214_080,
    "MPT 70B": 64_862_437_376,
}


def check(runs: Sequence[Published]) -> list[Row]:
    rows = all_rows(runs)
    assert not refused(rows)
    failed = [row for row in rows if row.run.reported == OUT_OF_MEMORY]
    assert failed and not any(row.fits for row in failed)
    for row in rows:
        if row.run.tokens == 2048 and row.run.model in PARAMETERS:
            assert row.parameters == PARAMETERS[row.run.model], row.run.model
        # Tensors use only a part of the memory that PyTorch reserves.
        if re.fullmatch(r"[\d.]+", row.run.reported):
            assert 0.8 * float(row.run.reported) < row.peak_gib < float(row.run.reported), row
    return rows


def test_runs_that_fitted_are_not_refused():
    """The runs with the least memory left, the measured ones, those that ran out of memory, and MPT on the smallest
    GPUs."""
    runs = [run for run in published() if run.source in ("hf", "titan-h100") or run.reported == OUT_OF_MEMORY]
    smallest = (40, "MPT 7B", 2048)
    runs.append(next(run for run in published() if (run.gib, run.model, run.tokens) == smallest))
    assert len(runs) > 6
    check(runs)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_page_of_published_runs_is_what_is_planned():
    rows = check(published())
    assert {row.run.model for row in rows} >= PARAMETERS.keys()
    assert page(rows) == PAGE.read_text()


def test_the_fused_loss_takes_the_logits_and_their_gradient(tmp_path: Path):
    """2 bytes each in bf16: flash-attn's kernel writes no logarithm, and its backward one tensor (``empty_like``)."""
    run = next(run for run in published() if (run.model, run.tokens) == ("MPT 125M", 2048))
    for loss, num_bytes in (("fused_crossentropy", 4), ("torch_crossentropy", 14)):
        planned = plan_mpt(run, "125M", tmp_path, loss_fn=loss)
        entries = run.microbatch * run.tokens * 50368
        assert planned.most_of(Kind.LOSS) / entries == pytest.approx(num_bytes, rel=0.05), loss


def test_flash_attention_of_a_hugging_face_model_keeps_no_scores(tmp_path: Path):
    """Foundry builds the model with eager attention if flash attention is not requested or not available."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(model | {"max_position_embeddings": 8192}))
    of_a_token = []
    for tokens in (1024, 4096):
        length = {"max_seq_len": tokens}
        file = {
            "model": {
                "name": "hf_causal_lm", "pretrained_model_name_or_path": str(tmp_path), "use_flash_attention_2": True
            },
            "tokenizer": {"name": "gpt2"},
            "train_loader": {"name": "finetuning", "dataset": length},
            "optimizer": {"name": "decoupled_adamw"},
            "scheduler": {"name": "constant"},
            "max_duration": "1ba",
            "global_train_batch_size": 4,
            "device_train_microbatch_size": 1,
            "precision": "amp_bf16",
            "fsdp_config": {},
            **length,
        }  # fmt: skip
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(file))
        planned = plan_step(read_run(path, world_size=4, model_config=tmp_path), "run.yaml", StepOptions())
        of_a_token.append(planned.most_of(Kind.ACTIVATIONS) / tokens)
    assert of_a_token[0] == pytest.approx(of_a_token[1], rel=1e-3)
