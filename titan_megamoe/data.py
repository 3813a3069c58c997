"""Text and a tokenizer to train on, made offline from the text that every CPython ships with.

    python -m titan_megamoe.data [--out assets/python_docs] [--vocab_size 2048] [--max_mb 16] [--force]

writes into the folder ``--out``
    corpus.jsonl                            one ``{"text": ...}`` a line: Python's help topics and its library's sources
    tokenizer.json, tokenizer_config.json   byte-level BPE trained on that corpus, for TorchTitan's HuggingFaceTokenizer
    manifest.json                           what the files were made from, and their sizes and SHA-256

The same Python, tokenizers library and settings give the same bytes, so a folder that fits its manifest is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

DATASET_NAME = "python_docs"
DEFAULT_DIR = "assets/python_docs"
CORPUS_FILE = "corpus.jsonl"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
MANIFEST_FILE = "manifest.json"
DATA_FILES = (CORPUS_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE)
EOS_TOKEN = "<|endoftext|>"
# The trainer allocates for the whole vocabulary at once, so a slip of a few zeros must not reach it.
MIN_VOCAB_SIZE, MAX_VOCAB_SIZE = 512, 100_000
RECIPE = 1  # raise it when a change of this file changes what it writes: folders made before are then rebuilt

TOPIC_PREFIX = "topic:"  # in the name of a document; the other documents are named by their path
# Tests with their fixtures, other packages, and build settings, which hold paths of the machine that built Python.
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
SKIPPED_PREFIXES = ("config-", "_sysconfigdata")
# Set by a machine's owner, and the topics' own file, whose content is documents already.
SKIPPED_FILES = {"sitecustomize.py", "usercustomize.py", "pydoc_data/topics.py"}


class DataError(RuntimeError):
    """One paragraph: what is wrong, and what to do about it."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a folder was made from, and what is in it."""

    recipe: int
    """Version of what this program writes."""
    python: str
    """Implementation and version whose text was read, such as ``CPython 3.11.7``."""
    tokenizers: str
    """Version of the ``tokenizers`` library."""
    vocab_size: int
    """Tokens, the end-of-text token (id 0) included; ids are ``0 .. vocab_size - 1``."""
    max_mb: float
    """The most that ``corpus.jsonl`` may hold, in megabytes (10^6 bytes)."""
    topics: int = 0
    """Documents that are help topics."""
    sources: int = 0
    """Documents that are source files."""
    left_out: int = 0
    """Documents for which ``max_mb`` left no room."""
    files: dict[str, dict[str, int | str]]
    """By file name, its size (``bytes``) and ``sha256``."""

    @property
    def settings(self) -> tuple:
        """All that decides the content of the files."""
        return self.recipe, self.python, self.tokenizers, self.vocab_size, self.max_mb

    def __str__(self) -> str:
        size = self.files[CORPUS_FILE]["bytes"] / 1e6
        return f"{self.topics} topics and {self.sources} sources, {size:.1f} MB; {self.vocab_size} tokens"


def build(out: Path, vocab_size: int = 2048, max_mb: float = 16, force: bool = False) -> Manifest:
    """Make sure that the folder ``out`` holds the corpus and the tokenizer, and return what it holds.

    Args:
        out: the folder; made if need be.
        vocab_size: tokens in the vocabulary, the end-of-text token included; 512 or more.
        max_mb: the most that ``corpus.jsonl`` may hold, in megabytes (10^6 bytes).
        force: rebuild what is up to date too, and overwrite a tokenizer that another program made.

    Raises:
        DataError: an argument, the folder or this Python's installation will not do.
    """
    started, out = time.monotonic(), Path(out)
    wanted = _wanted(vocab_size, max_mb)
    _check_folder(out, force)
    kept = _read_manifest(out)
    reason = "--force" if force else _why_stale(out, kept, wanted)
    if reason is None:
        _say(f"{out} is up to date: {kept}")
        return kept

    _say(f"building {out} ({reason}): reading the text of this Python")
    documents = _read_documents()
    try:
        out.mkdir(parents=True, exist_ok=True)
        # Built inside `out`, so that moving is atomic. Ranks building at once do no harm: they write the same bytes.
        with tempfile.TemporaryDirectory(dir=out, prefix=".building-") as folder:
            manifest = _write(Path(folder), documents, wanted)
            for name in (*DATA_FILES, MANIFEST_FILE):  # the manifest last: it vouches for the others
                os.replace(Path(folder) / name, out / name)
    except OSError as error:
        raise DataError(
            f"Cannot write into '{out}': {error}. Choose a folder (--out) that can be made and written, on a disk with "
            f"{2 * max_mb:g} MB free."
        ) from error
    _say(f"built {out} in {time.monotonic() - started:.1f} s: {manifest}")
    return manifest


def _wanted(vocab_size: int, max_mb: float) -> Manifest:
    """All that decides the result, checked: a manifest without content."""
    if not MIN_VOCAB_SIZE <= vocab_size <= MAX_VOCAB_SIZE:
        raise DataError(
            f"vocab_size = {vocab_size} will not do: 256 tokens are the bytes, one is the end of a text, and there is "
            f"text to learn some ten thousand others. Choose {MIN_VOCAB_SIZE} to {MAX_VOCAB_SIZE} (--vocab_size)."
        )
    if not (math.isfinite(max_mb) and max_mb > 0):
        raise DataError(f"max_mb = {max_mb} is no size. Choose a positive number of megabytes, such as 16 (--max_mb).")
    try:
        tokenizers_version = importlib.metadata.version("tokenizers")
    except importlib.metadata.PackageNotFoundError:
        raise DataError(
            f"This Python ({sys.executable}) has no `tokenizers` library, which trains the tokenizer. Use the environment that "
            "titan_megamoe was installed into (`pip install -e .` brings the library)."
        ) from None
    return Manifest(
        recipe=RECIPE,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        tokenizers=tokenizers_version,
        vocab_size=vocab_size,
        max_mb=float(max_mb),
        files={},
    )


def _check_folder(out: Path, force: bool) -> None:
    if os.path.exists(out) and not os.path.isdir(out):
        raise DataError(f"'{out}' is a file, not a folder. Choose a folder (--out), or move the file away.")
    # The corpus is moved in first, so that even a build cut short is recognized as ours.
    ours = os.path.exists(out / CORPUS_FILE) or os.path.exists(out / MANIFEST_FILE)
    if os.path.exists(out / TOKENIZER_FILE) and not ours and not force:
        raise DataError(
            f"'{out}' holds a tokenizer that this program did not make. Choose another folder (--out), or have the "
            "tokenizer overwritten with --force."
        )


def _read_manifest(out: Path) -> Manifest | None:
    try:
        return Manifest(**json.loads((out / MANIFEST_FILE).read_bytes()))
    except (OSError, ValueError, TypeError):  # absent, not JSON, or not our fields: build again
        return None


def _why_stale(out: Path, kept: Manifest | None, wanted: Manifest) -> str | None:
    if kept is None:
        return "it has no valid manifest" if os.path.exists(out) else "it does not exist yet"
    if kept.settings != wanted.settings:
        return "it was made with other settings, or by another version of Python, tokenizers or this program"
    if kept.files != {name: _fingerprint(out / name) for name in DATA_FILES}:
        return "a file is missing or is not as it was written"
    return None


def _fingerprint(path: Path) -> dict[str, int | str] | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _read_documents() -> dict[str, str]:
    """The text of each document by its name, topics and sources."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    sources, unreadable = {}, 0
    for folder, folders, files in os.walk(stdlib):
        folders[:] = [f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith(SKIPPED_PREFIXES)]
        for file in files:
            name = (Path(folder) / file).relative_to(stdlib).as_posix()
            if not file.endswith(".py") or file.startswith(SKIPPED_PREFIXES) or name in SKIPPED_FILES:
                continue
            try:
                sources[name] = (stdlib / name).read_bytes().decode("utf-8")
            except (OSError, UnicodeDecodeError):
                unreadable += 1
    if not sources:
        raise DataError(
            f"This Python ({sys.executable}) has no library sources in '{stdlib}', and they are the text to train on. "
            "Use a Python installed with its .py files, such as python.org's, conda's, uv's or a Linux distribution's."
        )
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package it apart
        topics = {}
        _say("this Python has no pydoc_data.topics: the corpus is its library's sources alone")
    if unreadable:
        _say(f"{unreadable} source files that cannot be read as UTF-8 are left out")
    documents = {TOPIC_PREFIX + name: text for name, text in topics.items()} | sources
    return {name: text for name, text in documents.items() if text.strip()}


def _write(folder: Path, documents: dict[str, str], wanted: Manifest) -> Manifest:
    # By hash, topics and the sources of all packages mix: whatever prefix is trained on is like the whole.
    names = sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest())
    room, kept = int(wanted.max_mb * 10**6), []
    with open(folder / CORPUS_FILE, "wb") as corpus:
        for name in names:
            line = json.dumps({"text": documents[name]}).encode() + b"\n"
            if len(line) <= room:
                room -= corpus.write(line)
                kept.append(name)
    left_out = len(names) - len(kept)
    if left_out:
        _say(f"{left_out} of {len(names)} documents are left out to stay within {wanted.max_mb:g} MB (--max_mb)")
    _say(f"training the tokenizer on {len(kept)} documents")
    _train_tokenizer(folder, [documents[name] for name in kept], wanted)

    topics = sum(name.startswith(TOPIC_PREFIX) for name in kept)
    files = {name: _fingerprint(folder / name) for name in DATA_FILES}
    manifest = replace(wanted, topics=topics, sources=len(kept) - topics, left_out=left_out, files=files)
    _write_json(folder / MANIFEST_FILE, asdict(manifest))
    return manifest


def _train_tokenizer(folder: Path, texts: list[str], wanted: Manifest) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # slow to import, and for this only

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=wanted.vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # every byte, so that any text can be encoded
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != wanted.vocab_size:
        raise DataError(
            f"The corpus of at most {wanted.max_mb:g} MB has text for {tokenizer.get_vocab_size()} tokens, not for "
            f"vocab_size = {wanted.vocab_size}. Choose a smaller --vocab_size, or a larger --max_mb if documents were "
            "left out."
        )
    # Not tokenizer.save, which reports a full disk as a bare Exception.
    (folder / TOKENIZER_FILE).write_bytes(tokenizer.to_str(pretty=True).encode())
    # No text is to begin with a special token; TorchTitan then adds the end-of-text token alone.
    _write_json(
        folder / TOKENIZER_CONFIG_FILE,
        {"bos_token": None, "eos_token": EOS_TOKEN, "tokenizer_class": "PreTrainedTokenizerFast"},
    )


def _write_json(path: Path, content: dict) -> None:
    path.write_bytes(json.dumps(content, indent=2).encode() + b"\n")


def _say(message: str) -> None:
    print(f"{DATASET_NAME}: {message}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m titan_megamoe.data",
        description="Make a corpus and a tokenizer to train on, offline, from the text that this Python ships with. "
        "A folder that is up to date is kept.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path(DEFAULT_DIR), help="the folder to write into")
    parser.add_argument(
        "--vocab_size", type=int, default=2048, help=f"tokens, the end of text included; {MIN_VOCAB_SIZE} or more"
    )
    parser.add_argument("--max_mb", type=float, default=16, help="the most corpus.jsonl may hold, in 10^6 bytes")
    parser.add_argument("--force", action="store_true", help="rebuild, and overwrite a tokenizer made by others")
    arguments = parser.parse_args()
    try:
        build(**vars(arguments))
    except DataError as error:
        print(f"titan_megamoe: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
