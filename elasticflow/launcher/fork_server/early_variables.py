"""Variables that the fork server's imports may have read before a launch said what it sets."""

from __future__ import annotations

# Variables of libraries that the server imports only once it knows the job's variables. The interpreter and the loader, numpy, torch
# and what these load read hundreds of others, under names of any kind and in C, too: they cannot be listed.
_LATER = (
    "ACCELERATE_", "AIM_", "ANTHROPIC_", "AWS_", "AZURE_", "BITSANDBYTES_", "CLEARML_", "COMET_", "DATASETS_", "DIFFUSERS_",
    "DVC_", "GCS_", "GITHUB_", "GOOGLE_", "HF_", "HUGGINGFACE_", "HUGGING_FACE_", "KAGGLE_", "MLFLOW_", "NEPTUNE_", "NLTK_",
    "OPENAI_", "PEFT_", "POLARS_", "RAY_", "S3_", "SENTENCE_TRANSFORMERS_", "SENTRY_", "SLURM_", "SPACY_", "TFDS_", "TIKTOKEN_",
    "TIMM_", "TOKENIZERS_", "TRACKIO_", "TRANSFORMERS_", "WANDB_",
)  # fmt: skip


def is_read_early(name: str) -> bool:
    """Return whether a variable may have been read before the server knew the job's."""
    return not name.startswith(_LATER)
