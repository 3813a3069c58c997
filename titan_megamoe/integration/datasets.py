"""Registers our offline corpus with TorchTitan's text datasets."""

from __future__ import annotations

from pathlib import Path

from datasets import load_dataset
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

from ..data import CORPUS_FILE, DATASET_NAME, DEFAULT_DIR


def register() -> None:
    """Make ``dataloader.dataset = "python_docs"`` selectable; ``dataloader.dataset_path`` overrides its folder."""
    DATASETS[DATASET_NAME] = DatasetConfig(
        path=DEFAULT_DIR,
        loader=lambda path: load_dataset("json", data_files=str(Path(path) / CORPUS_FILE), split="train"),
        sample_processor=lambda sample: sample["text"],
    )


def find_missing_data(config) -> str | None:
    """What a ``Trainer.Config`` reads from disk before its first step and is not there, and what to do; or None."""
    assets = Path(config.hf_assets_path)
    tokenizer_files = ("tokenizer.json", "vocab.txt", "vocab.json")
    if not any((assets / name).is_file() for name in tokenizer_files):
        return (
            f"hf_assets_path = '{config.hf_assets_path}' holds no tokenizer (one of {', '.join(tokenizer_files)}). "
            f"{_remedy(config.hf_assets_path)}"
        )
    dataloaders = [("dataloader", config.dataloader)]
    if config.validator.enable:
        dataloaders.append(("validator.dataloader", config.validator.dataloader))
    for section, dataloader in dataloaders:
        missing = _missing_dataset(section, dataloader)
        if missing:
            return missing
    return None


def _missing_dataset(section: str, dataloader) -> str | None:
    if dataloader.dataset not in DATASETS:
        return f"{section}.dataset = '{dataloader.dataset}' is not one of {', '.join(sorted(DATASETS))}."
    path = Path(dataloader.dataset_path or DATASETS[dataloader.dataset].path)
    if dataloader.dataset == DATASET_NAME:
        if not (path / CORPUS_FILE).is_file():
            return f"{section}.dataset = '{DATASET_NAME}' needs {path / CORPUS_FILE}, which does not exist. {_remedy(str(path))}"
    elif (dataloader.dataset_path or dataloader.dataset == "c4_test") and not path.exists():
        return (
            f"{section}.dataset = '{dataloader.dataset}' is read from '{path}', which does not exist. Set "
            f"{section}.dataset_path to where it is, or dataset = '{DATASET_NAME}' for text that is made offline."
        )
    return None


def _remedy(folder: str) -> str:
    return (
        f"Make one offline with `python -m titan_megamoe.data --out {folder}`, or download the model's with TorchTitan's "
        "scripts/download_hf_assets.py and point hf_assets_path at it."
    )
