"""The offline corpus and tokenizer: reproducible, kept while intact, rebuilt when not, and readable by TorchTitan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from titan_megamoe import data

REPOSITORY = Path(data.__file__).parents[1]
ALL_FILES = {*data.DATA_FILES, data.MANIFEST_FILE}
SMALL = {"vocab_size": 600, "max_mb": 0.5}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def texts_of(folder: Path) -> list[str]:
    lines = (folder / data.CORPUS_FILE).read_bytes().splitlines()
    return [json.loads(line)["text"] for line in lines]


def run_module(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "titan_megamoe.data", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env=os.environ | environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A small build that tests only read."""
    folder = tmp_path_factory.mktemp("data") / "small"
    data.build(folder, **SMALL)
    return folder


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> tuple[Path, data.Manifest]:
    """A build with the default settings that tests only read."""
    folder = tmp_path_factory.mktemp("data") / "full"
    return folder, data.build(folder)


@pytest.fixture(scope="module")
def tokenizer(small):
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(tokenizer_path=str(small))


# Same input, same bytes


@pytest.mark.parametrize("threads, hash_seed", [("1", "1"), ("5", "2")])
def test_another_process_builds_the_same_bytes(small, tmp_path, threads, hash_seed):
    arguments = [f"--{name}={value}" for name, value in SMALL.items()]
    environment = {"RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true", "PYTHONHASHSEED": hash_seed}
    result = run_module("--out", str(tmp_path / "again"), *arguments, **environment)
    assert result.returncode == 0, result.stderr
    assert set(contents(small)) == ALL_FILES  # nothing temporary is left either
    assert contents(tmp_path / "again") == contents(small)


def test_full_build_is_reproducible(full, tmp_path):
    data.build(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(full[0])


# Kept or rebuilt


def test_what_is_up_to_date_is_kept(full, capsys):
    folder, built = full
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    started = time.monotonic()
    kept = data.build(folder)
    assert time.monotonic() - started < 1
    assert kept == built
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert "up to date" in capsys.readouterr().err


def flip_a_byte(path: Path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", sorted(ALL_FILES))
@pytest.mark.parametrize("damage", [flip_a_byte, Path.unlink, lambda path: path.write_bytes(b"[1]")])
def test_damage_is_repaired(small, tmp_path, name, damage):
    for file, content in contents(small).items():
        (tmp_path / file).write_bytes(content)
    damage(tmp_path / name)
    data.build(tmp_path, **SMALL)
    assert contents(tmp_path) == contents(small)


@pytest.mark.parametrize("files", [None, [], "corpus.jsonl", {}, {data.CORPUS_FILE: 3}])
def test_manifest_with_wrong_types_is_not_trusted(small, tmp_path, files):
    for file, content in contents(small).items():
        (tmp_path / file).write_bytes(content)
    manifest = json.loads((small / data.MANIFEST_FILE).read_bytes())
    (tmp_path / data.MANIFEST_FILE).write_text(json.dumps(manifest | {"files": files}))
    data.build(tmp_path, **SMALL)
    assert contents(tmp_path) == contents(small)


@pytest.mark.parametrize("moved", range(len(data.DATA_FILES) + 1))
def test_build_cut_short_is_finished(small, tmp_path, monkeypatch, moved):
    replace_file, moves = os.replace, []

    def interrupted_replace(source, target):
        if len(moves) == moved:
            raise KeyboardInterrupt
        moves.append(target)
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", interrupted_replace)
    with pytest.raises(KeyboardInterrupt):
        data.build(tmp_path, **SMALL)
    assert set(contents(tmp_path)) < ALL_FILES
    monkeypatch.undo()
    data.build(tmp_path, **SMALL)
    assert contents(tmp_path) == contents(small)


@pytest.mark.parametrize("change", [{"vocab_size": 601}, {"max_mb": 0.4}])
def test_other_settings_rebuild(tmp_path, capsys, change):
    data.build(tmp_path, **SMALL)
    before = contents(tmp_path)
    manifest = data.build(tmp_path, **(SMALL | change))
    assert "other settings" in capsys.readouterr().err
    assert contents(tmp_path) != before
    assert SMALL | change == {name: getattr(manifest, name) for name in SMALL}


@pytest.mark.parametrize("field", ["python", "tokenizers", "recipe"])
def test_other_versions_rebuild(small, tmp_path, capsys, field):
    for file, content in contents(small).items():
        (tmp_path / file).write_bytes(content)
    manifest = json.loads((small / data.MANIFEST_FILE).read_bytes())
    (tmp_path / data.MANIFEST_FILE).write_text(json.dumps(manifest | {field: "another"}))
    data.build(tmp_path, **SMALL)
    assert "another version" in capsys.readouterr().err
    assert contents(tmp_path) == contents(small)


def test_force_rebuilds(tmp_path):
    data.build(tmp_path, **SMALL)
    before = (tmp_path / data.CORPUS_FILE).stat().st_ino
    data.build(tmp_path, **SMALL, force=True)
    assert (tmp_path / data.CORPUS_FILE).stat().st_ino != before


# The corpus


def test_every_document_has_text(full):
    folder, manifest = full
    texts = texts_of(folder)
    assert len(texts) == manifest.topics + manifest.sources
    assert all(isinstance(text, str) and text.strip() for text in texts)
    assert manifest.topics > 50 and manifest.sources > 300 and manifest.left_out == 0


def test_corpus_holds_topics_and_sources_but_no_tests(full):
    from pydoc_data.topics import topics

    stdlib, texts = Path(sysconfig.get_path("stdlib")), set(texts_of(full[0]))
    assert topics["assert"] in texts
    assert (stdlib / "json" / "decoder.py").read_text(encoding="utf-8") in texts
    for absent in ("test/support/__init__.py", "unittest/test/__init__.py", "pydoc_data/topics.py"):
        if (stdlib / absent).exists():  # distributions may leave out the tests
            assert (stdlib / absent).read_text(encoding="utf-8") not in texts
    assert not any("_sysconfigdata" in name for name in data._read_documents())


def test_every_prefix_is_a_mix(full):
    from pydoc_data.topics import topics

    topic_texts, texts = set(topics.values()), texts_of(full[0])
    quarter = len(texts) // 4
    for start in range(0, 4 * quarter, quarter):
        share = sum(text in topic_texts for text in texts[start : start + quarter]) / quarter
        assert 0.02 < share < 0.3  # 0.1 in all


def test_cap_is_kept_and_reported(tmp_path, capsys):
    manifest = data.build(tmp_path, **SMALL)
    size = (tmp_path / data.CORPUS_FILE).stat().st_size
    assert 0.4e6 < size <= 0.5e6
    total = len(data._read_documents())
    assert manifest.left_out == total - len(texts_of(tmp_path)) > 0
    assert f"{manifest.left_out} of {total} documents are left out" in capsys.readouterr().err


def test_manifest_describes_the_files(full):
    folder, manifest = full
    assert json.loads((folder / data.MANIFEST_FILE).read_bytes()) == asdict(manifest)
    assert {name: entry["bytes"] for name, entry in manifest.files.items()} == {
        name: (folder / name).stat().st_size for name in data.DATA_FILES
    }


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_reads_the_corpus(full, tmp_path, streaming):
    datasets = pytest.importorskip("datasets")
    folder, _ = full
    rows = datasets.load_dataset(
        "json",
        data_files=str(folder / data.CORPUS_FILE),
        split="train",
        streaming=streaming,
        cache_dir=str(tmp_path),
    )
    assert [row["text"] for row in rows] == texts_of(folder)


# The tokenizer


@settings(max_examples=150, deadline=None)
@given(text=st.text())
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text)
    assert all(0 < token < SMALL["vocab_size"] for token in ids)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    "text",
    ["", " ", "  x\t\r\n\n", "naïve Ünïcödé — 日本語 🧪👩‍🔬", "\x00\x7f\u2028\ufeff\U0010ffff", "e\u0301 \u00e9"],
)
def test_awkward_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_corpus_round_trips(small, tokenizer):
    texts = texts_of(small)
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts


def test_end_of_text_is_added_and_nothing_at_the_start(tokenizer):
    assert tokenizer.eos_token == data.EOS_TOKEN and tokenizer.bos_id is None
    plain = tokenizer.encode("import this")
    assert tokenizer.eos_id not in plain
    assert tokenizer.encode("import this", add_bos=True, add_eos=True) == [*plain, tokenizer.eos_id]
    assert tokenizer.decode([*plain, tokenizer.eos_id]) == "import this"


@pytest.mark.parametrize("vocab_size", [512, 600, 2048])
def test_vocabulary_has_the_size_asked_for(tmp_path, vocab_size):
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    data.build(tmp_path, vocab_size=vocab_size, max_mb=0.5)
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(tmp_path))
    assert tokenizer.get_vocab_size() == vocab_size
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocab_size))


def test_default_vocabulary_compresses(full):
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    folder, _ = full
    sample = "\n".join(texts_of(folder)[:40])
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(folder))
    assert len(sample.encode()) / len(tokenizer.encode(sample)) > 2.5  # bytes a token


# What goes wrong is said in one paragraph, and nothing is written


@pytest.mark.parametrize("vocab_size", [-1, 0, 511, 10**12])
def test_vocabulary_size_out_of_range(tmp_path, vocab_size):
    with pytest.raises(data.DataError, match=rf"vocab_size = {vocab_size} .*Choose 512 to"):
        data.build(tmp_path / "out", vocab_size=vocab_size)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("max_mb", [0, -3, float("nan"), float("inf")])
def test_cap_is_no_size(tmp_path, max_mb):
    with pytest.raises(data.DataError, match=r"max_mb = .* is no size.*positive"):
        data.build(tmp_path / "out", max_mb=max_mb)


@pytest.mark.parametrize("max_mb", [1e-6, 0.02])
def test_too_little_text_for_the_vocabulary(tmp_path, max_mb):
    with pytest.raises(data.DataError, match=r"has text for \d+ tokens, not for vocab_size = 4096.*smaller"):
        data.build(tmp_path, vocab_size=4096, max_mb=max_mb)
    assert not list(tmp_path.iterdir())


def test_out_is_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(data.DataError, match=r"'.*file' is a file, not a folder.*--out"):
        data.build(tmp_path / "file", **SMALL)
    assert (tmp_path / "file").read_text() == "mine"


def test_out_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(data.DataError, match=r"Cannot write into '.*below': .*Choose a folder"):
        data.build(tmp_path / "file" / "below", **SMALL)


@pytest.mark.skipif(os.name == "posix" and os.geteuid() == 0, reason="root may write everywhere")
def test_out_is_not_writable(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(data.DataError, match="Cannot write into .*Permission denied"):
        data.build(tmp_path, **SMALL)


def test_disk_is_full(tmp_path, monkeypatch):
    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(data, "_train_tokenizer", no_space)
    with pytest.raises(data.DataError, match="No space left on device.*1 MB free"):
        data.build(tmp_path, **SMALL)
    assert not list(tmp_path.iterdir())


def test_python_without_sources(tmp_path, monkeypatch):
    (tmp_path / "stdlib").mkdir()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "stdlib"))
    with pytest.raises(data.DataError, match=r"no library sources in '.*stdlib'.*Use a Python"):
        data.build(tmp_path / "out", **SMALL)


def test_undecodable_sources_and_test_folders_are_skipped(tmp_path, monkeypatch, capsys):
    for name in ("good.py", "test/t.py", "pkg/tests/t.py", "site-packages/s.py", "config-3/c.py", "sitecustomize.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("print('é')", encoding="utf-8")
    (tmp_path / "latin.py").write_bytes("print('é')".encode("latin-1"))
    (tmp_path / "empty.py").write_text(" \n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    documents = data._read_documents()
    assert {name for name in documents if not name.startswith(data.TOPIC_PREFIX)} == {"good.py"}
    assert "1 source files" in capsys.readouterr().err


def test_a_tokenizer_of_others_is_not_overwritten(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(data.DataError, match="did not make.*--force"):
        data.build(tmp_path, **SMALL)
    assert contents(tmp_path) == {"tokenizer.json": b"{}"}
    data.build(tmp_path, **SMALL, force=True)
    assert set(contents(tmp_path)) == ALL_FILES


def test_command_line(tmp_path):
    result = run_module("--out", str(tmp_path), "--vocab_size", "100")
    assert result.returncode == 2
    assert result.stderr.startswith("titan_megamoe: vocab_size = 100 ") and result.stderr.count("\n") == 1
    usage = run_module("--help")
    assert usage.returncode == 0
    assert all(option in usage.stdout for option in ("--out", "--vocab_size", "--max_mb", "--force"))


def test_starts_without_torch():
    code = "import sys, titan_megamoe.data; sys.exit('torch' in sys.modules or 'tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0
