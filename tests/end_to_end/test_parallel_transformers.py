"""`[parallel]` on models of others: a Llama of transformers, and one with LoRA adapters of peft, with the bits of one that is not sharded."""

from __future__ import annotations

import importlib.util
import shutil
from typing import TYPE_CHECKING

import pytest

from elasticflow.scaffold import gallery
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from tests.end_to_end.by_hand import undisturbed
from tests.forked import ForkedPrograms

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NEEDS = ("transformers", "peft")
# Each process would spend seconds on these.
IMPORTED = (*NEEDS, "transformers.models.llama.modeling_llama", "torch.distributed.fsdp")
STEPS, HALF = 4, 2

# The third batch is short: most workers have no samples of it.
REST = f"""
[optimizer]
entry = "torch.optim:AdamW"
args = {{ lr = 5e-3 }}

[dataset]
entry = "lora:Instructions"
args = {{ samples = 18 }}
collate = "lora:padded"
global_batch_size = 8
tail = "short"

[train]
steps = {STEPS}
consistency = "exact"
virtual_shards = 4
threads = 1

[nodes]
device = "cpu"

[snapshots]
every = "{HALF} steps"
"""
CONFIG = """
entry = "transformers:LlamaConfig"
args.vocab_size = 128
args.hidden_size = 16
args.intermediate_size = 24
args.num_hidden_layers = 2
args.num_attention_heads = 4
args.num_key_value_heads = 2
args.attention_dropout = 0.1
args.max_position_embeddings = 64
"""
LLAMA = f"""
[job]
name = "llama"
seed = 1

[model]
entry = "transformers:LlamaForCausalLM"
step = "elasticflow.hugging_face:training_step"

[model.args.config]
{CONFIG}
{REST}
"""
LORA = f"""
[job]
name = "lora"
seed = 1

[model]
entry = "peft:get_peft_model"
step = "elasticflow.hugging_face:training_step"

[model.args.model]
entry = "transformers:AutoModelForCausalLM.from_config"
args.dtype = "float32"

[model.args.model.args.config]
{CONFIG}
[model.args.peft_config]
entry = "peft:LoraConfig"
args.task_type = "CAUSAL_LM"
args.r = 3
args.lora_dropout = 0.1
args.target_modules = ["q_proj", "down_proj"]
{REST}
"""
WRAP = 'parallel.wrap=["transformers.models.llama.modeling_llama:LlamaDecoderLayer"]'
# An optimizer that clips by norm has the same bits only where it is told `shard = 1`.
CLIPPED = ("optimizer.clip_grad_norm=0.5", "parallel.shard=1")
JOBS = {
    "llama": (LLAMA, ()),
    "llama, tied, bf16, clipped": (
        LLAMA,
        (
            "model.args.config.args.tie_word_embeddings=true",
            "train.precision=bf16",
            "train.gradient_checkpointing=true",
            *CLIPPED,
            WRAP,
        ),
    ),
    "lora": (LORA, ()),
    "lora, trained head, frozen bf16, clipped": (
        LORA,
        (
            "model.args.model.args.dtype=bfloat16",
            'model.args.peft_config.args.modules_to_save=["lm_head"]',
            *CLIPPED,
        ),
    ),
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedPrograms]:
    """Yield what starts processes that have transformers and peft imported."""
    missing = [module for module in NEEDS if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install {' '.join(missing)}")
    made = ForkedPrograms(tmp_path_factory.mktemp("forked"), IMPORTED)
    yield made
    made.close()


# The plain ones show nothing that the others do not, and are quicker to look into when something is wrong.
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly if name in ("llama", "lora") else ()) for name in JOBS],
)
def test_models_of_others_have_the_same_bits_at_every_degree(
    name: str, tmp_path: Path, programs: ForkedPrograms
) -> None:
    """Two replicas of two; a copy of two that continues as one of four, and as one that is whole."""
    job, whole = JOBS[name]
    (tmp_path / "job.toml").write_text(job)
    for file in ("lora.py", "pyproject.toml"):
        (tmp_path / file).write_bytes(gallery.files_of("lora")[file])

    def trained(workers: int, *sets: str, place: str | None = None) -> dict[str, bytes]:
        return undisturbed(
            tmp_path / "job.toml",
            programs,
            workers=workers,
            sets=(*whole, *sets),
            place=None if place is None else tmp_path / place,
        )

    expected = trained(1)
    assert trained(4, "parallel.shard=2") == expected
    half = trained(2, "parallel.shard=2", f"train.steps={HALF}", place="four")
    shutil.copytree(tmp_path / "four", tmp_path / "whole")
    assert trained(4, "parallel.shard=4", place="four") == expected != half
    assert trained(1, place="whole") == expected
    for place in ("four", "whole"):
        newest = Catalog(Storage(str(tmp_path / place)), "by-hand/").newest()
        assert newest is not None
        assert (newest.step, newest.generation) == (STEPS, 2)
