"""A run begins from a Llama checkpoint: version 0 of its paths is the checkpoint, and what does not fit is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stages_harness import run_file
from tiny_run import SEED_NUMBER, signer
from tokenizers import Tokenizer as Bpe
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from bootstrap.checkpoint import Checkpoint
from bootstrap.cli import app
from bootstrap.genesis.prepare import prepare
from bootstrap.runfile import RunFile, load_run_file
from bootstrap.use.export import Wish, export_run
from dipaco_p2p.config import InnerConfig, LevelConfig, ModelConfig, WarmupConfig
from dipaco_p2p.core.model.inner import InnerLoop
from dipaco_p2p.core.model.shards import decode_shard
from dipaco_p2p.errors import ConfigError
from dipaco_p2p.node.run import Run
from dipaco_p2p.use.folder import GRID, RunFolder
from dipaco_p2p.use.served import open_served
from dipaco_p2p.use.tokenizer import END, END_ID, Tokenizer

VOCABULARY, PADDED, END_THERE = 290, 300, 2
TEXT = "the naïve model  of 2 old\n\tpears <s> and </s> here"
MODEL = ModelConfig(
    vocab_size=PADDED,
    width=16,
    heads=4,
    ffn_width=24,
    context=72,
    rope_theta=5000.0,
    norm_eps=1e-6,
    tied=False,
    levels=(LevelConfig(embedding=True), LevelConfig(modules=2, blocks=2), LevelConfig(blocks=1, head=True)),
)
WORDS = "of the old model and a naïve pear 2 3 said: here, there\n".split(" ")


def write_checkpoint(folder: Path, *, tied: bool = False, groups: int = 2, shards: bool = False) -> LlamaForCausalLM:
    """A tiny random Llama by transformers, and a byte-level BPE that ends with `</s>`, number 2."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=PADDED,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=groups,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=END_THERE,
        initializer_range=0.5,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder, **({"max_shard_size": "20KB"} if shards else {}))
    bpe = Bpe(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<unk>", "<s>", "</s>", "<s\N{FULLWIDTH VERTICAL LINE}>"],
        initial_alphabet=letters,
        show_progress=False,
    )
    lots = np.random.default_rng(0)
    bpe.train_from_iterator((" ".join(lots.choice(WORDS, 40)) for _ in range(50)), trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    bpe.save(str(folder / "tokenizer.json"))
    return model


def file_of(tmp_path: Path, model: ModelConfig, **changes: Any) -> RunFile:
    corpus = tmp_path / "corpus.jsonl"
    lots = np.random.default_rng(1)
    corpus.write_text("".join(json.dumps({"text": " ".join(lots.choice(WORDS, 220))}) + "\n" for _ in range(60)))
    file = run_file(corpus, **{"model": model, "warmup": WarmupConfig(rounds=0), **changes})
    return replace(file, checkpoint=str(tmp_path / "llama"))


def moved(number: int) -> int:
    """What a token of the checkpoint is in the run."""
    return {END_THERE: END_ID, END_ID: END_THERE}.get(number, number)


@pytest.mark.parametrize(("tied", "groups", "shards"), [(False, 2, False), (True, 4, True), (False, 1, False)])
def test_version_0_of_every_path_gives_the_logits_of_the_checkpoint(
    tmp_path: Path, tied: bool, groups: int, shards: bool
) -> None:
    theirs = write_checkpoint(tmp_path / "llama", tied=tied, groups=groups, shards=shards)
    assert shards == (tmp_path / "llama" / "model.safetensors.index.json").exists()
    levels = (
        (LevelConfig(embedding=True, head=True), *MODEL.levels[1:2], LevelConfig(blocks=1)) if tied else MODEL.levels
    )
    run = _prepared(tmp_path, file_of(tmp_path, replace(MODEL, tied=tied, levels=levels)))
    assert run.is_last_stage and run.topology.path_count == 2
    for path in run.topology.paths():
        _export(tmp_path / "run", str(path), tmp_path / str(path))
        ours, tokenizer = (kind.from_pretrained(tmp_path / str(path)) for kind in (LlamaForCausalLM, AutoTokenizer))
        own = Bpe.from_file(str(tmp_path / "llama" / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
        ids = tokenizer(TEXT)["input_ids"]
        assert tokenizer.decode(ids) == TEXT and tokenizer.eos_token_id == END_ID and tokenizer.eos_token == END
        plain = [number for number in own if number not in (0, 1, 2)]
        assert set(map(moved, plain)) <= set(ids), "but for its special tokens, whose letters are text here"
        tokens = torch.randint(VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            there = theirs(tokens).logits[..., [moved(number) for number in range(PADDED)]]
            here = ours(tokens.clone().apply_(moved)).logits
        assert there.std() > 0.1
        torch.testing.assert_close(here, there, atol=1e-4, rtol=1e-4)


def test_an_untied_run_may_begin_from_a_tied_checkpoint(tmp_path: Path) -> None:
    theirs = write_checkpoint(tmp_path / "llama", tied=True)
    first, _, last = Checkpoint(tmp_path / "llama", MODEL).flats()
    rows = theirs.get_input_embeddings().weight.detach().numpy()[[2, 1, 0, *range(3, PADDED)]]
    assert np.array_equal(first.reshape(PADDED, 16), rows)
    assert np.array_equal(last[: PADDED * 16].reshape(PADDED, 16), rows)


def test_its_tokenizer_keeps_every_text_and_every_number_has_a_token(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "llama")
    tokenizer = Tokenizer(Checkpoint(tmp_path / "llama", MODEL).tokenizer())
    assert tokenizer.vocab_size == PADDED
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT and END_ID not in tokenizer.encode(TEXT)
    assert tokenizer.token_bytes(END_ID) == END.encode() and tokenizer.token_bytes(PADDED - 1)
    lengths = tokenizer.byte_lengths()
    assert sum(lengths[tokenizer.encode(TEXT)]) == len(TEXT.encode())


def test_the_moments_of_what_was_trained_are_taken_at_the_start(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "llama")
    file = file_of(tmp_path, MODEL)
    run = _prepared(tmp_path, file)
    store = RunFolder(tmp_path / "run").store(GRID)
    loop = InnerLoop(InnerConfig(), 1, MODEL, device="cpu", seed=0)
    loop.load_state(store.get(run.manifest.optimizer.digest) or b"")
    assert loop.state().moments()[0] > 0
    shard = decode_shard(store.get(run.manifest.shards[0].blob.digest) or b"", vocab_size=PADDED, context=72)
    assert (shard.tokens == END_ID).any(), "documents end as in every run"


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("config.json", lambda c: c.update(intermediate_size=32), "`ffn_width = 32`"),
        ("config.json", lambda c: c.update(num_hidden_layers=5), "levels with 5 blocks together, not 3"),
        ("config.json", lambda c: c.update(tie_word_embeddings=False, rms_norm_eps=1e-5), "`norm_eps = 1e-05`"),
        ("config.json", lambda c: c.update(max_position_embeddings=64), "a `context` of at most 64, not 72"),
        ("config.json", lambda c: c.update(model_type="mistral"), "model_type 'mistral'"),
        ("config.json", lambda c: c.update(attention_bias=True), "biases"),
        ("config.json", lambda c: c.update(rope_parameters={"rope_type": "llama3", "rope_theta": 5000.0}), "llama3"),
        ("config.json", lambda c: c.update(eos_token_id=None), "no end token"),
        ("tokenizer.json", lambda t: t.update(pre_tokenizer=None), "not a byte-level BPE"),
        ("tokenizer.json", lambda t: t["model"].update(type="Unigram"), "not a byte-level BPE"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_2_and_one_line(
    tmp_path: Path, name: str, change: Change, words: str
) -> None:
    write_checkpoint(tmp_path / "llama")
    content = json.loads((tmp_path / "llama" / name).read_text())
    change(content)
    (tmp_path / "llama" / name).write_text(json.dumps(content))
    told = _planned(tmp_path)
    assert told.exit_code == 2 and words in told.output, told.output
    assert told.output.count("error: ") == 1 and "Traceback" not in told.output


def test_a_folder_that_is_no_checkpoint_is_2(tmp_path: Path) -> None:
    told = _planned(tmp_path)
    assert told.exit_code == 2 and "config.json" in told.output and "hint: " in told.output
    write_checkpoint(tmp_path / "llama")
    assert _planned(tmp_path).exit_code == 0
    (tmp_path / "llama" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="cannot be read"):
        _prepared(tmp_path, file_of(tmp_path, MODEL))


def test_a_checkpoint_is_forked_at_once_unless_a_warm_up_is_asked_for(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "llama")
    _planned(tmp_path)
    file = load_run_file(tmp_path / "run.toml")
    assert file.run.warmup == WarmupConfig(rounds=0) and file.checkpoint == str(tmp_path / "llama")
    path = tmp_path / "run.toml"
    path.write_text(path.read_text().replace("[warmup]", "[warmup]\nrounds = 2"))
    assert load_run_file(path).run.warmup.rounds == 2
    warm = _prepared(tmp_path, file_of(tmp_path, MODEL, warmup=WarmupConfig(rounds=2)))
    assert not warm.is_last_stage
    flats = Checkpoint(tmp_path / "llama", MODEL).flats()
    genesis = {one.module.level: one.blob.digest for one in warm.manifest.genesis}
    store = RunFolder(tmp_path / "run").store("warmup")
    assert all(flat.tobytes() in (store.get(genesis[level]) or b"") for level, flat in enumerate(flats))


def _prepared(tmp_path: Path, file: RunFile) -> Run:
    (tmp_path / "run").mkdir(exist_ok=True)
    return prepare(file, RunFolder(tmp_path / "run"), signer(SEED_NUMBER))


def _planned(tmp_path: Path) -> Any:
    path = tmp_path / "run.toml"
    levels = [
        f"[[model.levels]]\nmodules = {one.modules}\nblocks = {one.blocks}\n"
        f"embedding = {json.dumps(one.embedding)}\nhead = {json.dumps(one.head)}\n"
        for one in MODEL.levels
    ]
    keys = ("vocab_size", "width", "heads", "ffn_width", "context", "rope_theta", "norm_eps", "tied")
    sizes = "".join(f"{key} = {json.dumps(getattr(MODEL, key))}\n" for key in keys)
    path.write_text(f'[warmup]\nfrom = "llama"\n[model]\n{sizes}{"".join(levels)}')
    return CliRunner().invoke(app, ["plan", str(path)], env={"COLUMNS": "200"})


def _export(folder: Path, path: str, to: Path) -> None:
    async def main() -> None:
        async with open_served(str(folder), expected=None) as served:
            await export_run(served, Wish(path=path), to)

    asyncio.run(main())
