"""`dipaco-bootstrap generate`: the routed path writes what it alone would write, and no other path is read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from serving_harness import (
    CONTEXT,
    PROMPT,
    ROUNDS,
    TIED,
    TOKENIZER,
    UNTIED,
    Served,
    make_served,
    random_router,
    run_cli,
    write,
)

from bootstrap.use.generate import Request
from dipaco_p2p.core.model.generate import visible
from dipaco_p2p.core.model.transformer import PathModel
from dipaco_p2p.errors import ConfigError, IntegrityError, WrongRun
from dipaco_p2p.protocol.documents import BlobRef
from dipaco_p2p.topology import PathId
from dipaco_p2p.use import served as serving
from dipaco_p2p.use.folder import RunFolder
from dipaco_p2p.use.tokenizer import END, Pieces, Tokenizer

SHORT = "the path"
GREEDY = Request(prompt=PROMPT, tokens_max=40, temperature=0)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_served(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Without a token router."""
    return make_served(tmp_path_factory.mktemp("plain"), model=UNTIED, has_token_router=False)


@torch.no_grad()
def plain_greedy(model: PathModel, tokens: list[int], count: int) -> list[int]:
    """The likeliest token every time, all read anew, until the end of the document."""
    text = list(tokens)
    for _ in range(count):
        logits = model(torch.tensor([text[visible(len(text), CONTEXT) :]]))[0, -1]
        text.append(int(logits.argmax()))
        if text[-1] == 0:
            break
    return text[len(tokens) :]


def decode(tokens: list[int]) -> str:
    return Tokenizer(TOKENIZER).decode([token for token in tokens if token])


@torch.no_grad()
def routed(served: Served, tokens: list[int]) -> PathId:
    """By the formula of the router, with plain torch."""
    router = served.router
    mean = served.frozen().hidden(torch.tensor([tokens[:32]]))[0].mean(dim=0).numpy()
    return served.run.topology.path(int(((mean - router.mean) / router.scale @ router.weights.T).argmax()))


@pytest.mark.parametrize("prompt", [PROMPT, "Another text altogether, 0123456789 0123456789", SHORT, "é"])
def test_the_path_that_the_router_names_writes_what_it_alone_would(served: Served, prompt: str) -> None:
    tokens = Tokenizer(TOKENIZER).encode(prompt)
    path = routed(served, tokens)
    written = write(served, replace(GREEDY, prompt=prompt))
    assert written.text == decode(plain_greedy(served.model(path), tokens, 40))
    assert written.said[-1].startswith(f"{path}: L0.M0 version {ROUNDS}, ")


def test_prompts_go_different_ways(served: Served) -> None:
    prompts = [PROMPT, "Another text altogether, 0123456789 0123456789", SHORT, "é", "=" * 40, "a b c d e f g h i j k"]
    assert len({write(served, replace(GREEDY, prompt=prompt)).said[-1] for prompt in prompts}) >= 3


def test_a_short_prompt_is_routed_by_what_is_there_and_that_is_said(served: Served) -> None:
    count = len(Tokenizer(TOKENIZER).encode(SHORT))
    assert count < 32
    assert write(served, replace(GREEDY, prompt=SHORT)).said[0] == (
        f"the prompt has {count} tokens, fewer than the 32 that routing looks at: it is routed by those"
    )
    assert len(write(served, GREEDY).said) == 1
    assert len(write(served, replace(GREEDY, prompt=SHORT, path="P0-0-0")).said) == 1


def test_a_prompt_beyond_the_context_is_read_from_its_end_and_that_is_said(served: Served) -> None:
    prompt = " ".join(map(str, range(80)))
    tokens = Tokenizer(TOKENIZER).encode(prompt)
    written = write(served, replace(GREEDY, prompt=prompt, tokens_max=8))
    seen = len(tokens) - visible(len(tokens), CONTEXT)
    assert written.said[0] == f"the prompt has {len(tokens)} tokens, a path sees 72: it begins with the last {seen}"
    assert written.text == decode(plain_greedy(served.model(routed(served, tokens)), tokens, 8))


def test_a_path_and_a_version_can_be_forced(plain: Served) -> None:
    tokens = Tokenizer(TOKENIZER).encode(PROMPT)
    for name in ("P0-0", "P1-1"):
        for version in (0, 1, ROUNDS):
            written = write(plain, replace(GREEDY, path=name, version=version))
            model = plain.model(PathId.parse(name), version)
            assert written.text == decode(plain_greedy(model, tokens, 40))
            assert written.said == [f"{name}: L0.M{name[1]} version {version}, L1.M{name[3]} version {version}"]


@torch.no_grad()
def token_routed(served: Served, tokens: list[int]) -> PathId:
    if len(tokens) <= 32:
        return routed(served, tokens)
    router = served.token_router
    hidden = served.frozen().hidden(torch.tensor([tokens[visible(len(tokens), CONTEXT) :]]))[0]
    point = torch.cat((hidden[-32:].mean(dim=0), hidden.mean(dim=0))).numpy()
    return served.run.topology.path(int(((point - router.mean) / router.scale @ router.weights.T).argmax()))


@pytest.mark.parametrize("every", [16, 32])
@pytest.mark.parametrize("prompt", [PROMPT, SHORT])
def test_a_text_can_be_routed_anew_every_so_many_tokens(served: Served, every: int, prompt: str) -> None:
    text = Tokenizer(TOKENIZER).encode(prompt)
    start, paths = len(text), []
    for count in [every] * (100 // every) + [100 % every]:
        paths.append(token_routed(served, text))
        text += plain_greedy(served.model(paths[-1]), text, count)
    assert 0 not in text
    written = write(served, replace(GREEDY, prompt=prompt, every=every, tokens_max=100))
    assert written.text == decode(text[start:])
    said = [line.split(":")[0] for line in written.said if line.startswith("P")]
    assert said == [str(path) for at, path in enumerate(paths) if not at or path != paths[at - 1]]
    assert len(said) >= 2


def test_the_seed_decides_the_text(served: Served) -> None:
    request = replace(GREEDY, temperature=1.0)
    first = write(served, request).text
    assert first == write(served, request).text
    assert first != write(served, replace(request, seed=1)).text


def test_only_one_path_and_the_model_that_routes_are_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    blob = serving._Folder.blob

    async def noted(self: serving._Folder, ref: BlobRef) -> bytes:
        read.append(ref.digest)
        return await blob(self, ref)

    monkeypatch.setattr(serving._Folder, "blob", noted)
    run = served.open()
    versions = asyncio.run(run.path_versions(served.run.topology.path(2)))
    names = {version.digest: f"{version.module} {version.version}" for version in versions}
    names |= {version.digest: f"{version.module} {version.version}" for version in run.feature_versions()}
    write(served, replace(GREEDY, path="P0-1-0"))
    assert [names.get(name) for name in read[1:]] == ["L0.M0 3", "L1.M1 3", "L2.M0 3"]
    read.clear()
    write(served, GREEDY)
    assert len(read) == 1 + 1 + 3 + 3  # the tokenizer, the router, the frozen model, the path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"every": 15}, "`--every 15`: not a positive multiple of 16"),
        ({"every": -16}, "`--every -16`: not a positive multiple of 16"),
        ({"every": 80}, "`--every 80`: more than the 72 tokens that a path sees"),
        ({"every": 16, "path": "P0-0-0"}, "nothing is left to route"),
        ({"path": "P0-2-0"}, "has no path P0-2-0"),
        ({"path": "P0-0"}, "has no path P0-0"),
        ({"path": "0-0"}, "`0-0` is not a path"),
        ({"version": 4}, "has no version 4 yet: its newest is 3"),
        ({"prompt": ""}, "the prompt is empty"),
    ],
)
def test_what_cannot_be_done_is_one_clear_line(served: Served, change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=".*") as caught:
        write(served, replace(GREEDY, **change))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_run_without_a_token_router_says_so(plain: Served) -> None:
    with pytest.raises(ConfigError, match="has no router that can be asked inside a text"):
        write(plain, replace(GREEDY, every=16))
    assert write(plain, GREEDY).text


def test_a_run_of_one_path_routes_nothing(tmp_path: Path) -> None:
    served = make_served(tmp_path, model=TIED.one_path(), has_token_router=False)
    tokens = Tokenizer(TOKENIZER).encode(SHORT)
    written = write(served, replace(GREEDY, prompt=SHORT))
    assert written.text == decode(plain_greedy(served.model(PathId((0, 0, 0))), tokens, 40))
    assert [line.split(":")[0] for line in written.said] == ["P0-0-0"]
    with pytest.raises(ConfigError, match="has no router that can be asked inside a text"):
        write(served, replace(GREEDY, every=16))


@pytest.mark.parametrize(
    ("router", "words"),
    [
        (random_router(TIED.width, seed=0, path_count=9), "9 paths, expected 4"),
        (random_router(8, seed=0), "8 features, expected 16"),
    ],
)
def test_a_router_of_another_run_is_refused(tmp_path: Path, router: object, words: str) -> None:
    served = make_served(tmp_path, router=router)
    with pytest.raises(IntegrityError, match=f"a router of another run: it has {words}"):
        write(served, GREEDY)
    assert write(served, replace(GREEDY, path="P0-1-1")).text


def test_a_damaged_module_is_refused(tmp_path: Path) -> None:
    served = make_served(tmp_path)
    [version] = asyncio.run(served.open().path_versions(PathId((0, 0, 0))))[1:2]
    [blob] = (served.store.folder / "blobs").rglob(version.digest)
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    with pytest.raises(IntegrityError, match="damaged"):
        write(served, replace(GREEDY, path="P0-0-1"))
    with pytest.raises(IntegrityError, match="missing"):
        write(served, replace(GREEDY, path="P0-0-1"))
    assert write(served, replace(GREEDY, path="P0-1-1")).text


def test_a_run_can_be_named(served: Served) -> None:
    folder = RunFolder(served.root)
    for expected in (None, served.run.id, served.run.id[:8], f"run:{served.run.id[:8]}"):
        assert serving.open_folder(folder, expected=expected).run.id == served.run.id
    with pytest.raises(WrongRun, match="not run:abcdef01"):
        serving.open_folder(folder, expected="abcdef0123456")


@pytest.mark.parametrize("seed", range(5))
def test_pieces_are_the_text_whatever_the_tokens(seed: int) -> None:
    tokenizer = Tokenizer(TOKENIZER)
    noise = np.random.default_rng(seed).integers(1, 260, 200).tolist()  # hardly any of it is UTF-8
    for tokens in (noise, tokenizer.encode("naïve \N{FIRE}\N{FAMILY} the end"), tokenizer.encode("\N{FIRE}")[:3]):
        pieces = Pieces(tokenizer)
        assert "".join([pieces.add(token) for token in tokens] + [pieces.rest()]) == tokenizer.decode(tokens)


def test_half_a_character_waits_for_its_rest() -> None:
    tokenizer = Tokenizer(TOKENIZER)
    pieces = Pieces(tokenizer)
    assert [pieces.add(token) for token in tokenizer.encode("é!")] == ["", "é", "!"]


# -- the command line


def test_the_command_writes_the_text_and_says_the_path_aside(served: Served) -> None:
    expected = write(served, GREEDY)
    options = ("--max-tokens", "40", "--temperature", "0")
    said = (0, expected.text + "\n", expected.said[0] + "\n")
    assert run_cli("generate", str(served.root), PROMPT, *options) == said
    assert run_cli("generate", str(served.root), *options, text=PROMPT + "\n")[1] == expected.text + "\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--every", "24"), 2, "error: `--every 24`: not a positive multiple of 16"),
        (("--every", "128"), 2, "error: `--every 128`: more than the 72 tokens that a path sees"),
        (("--path", "P9-9-9"), 2, "has no path P9-9-9"),
        (("--run", "abcdef01"), 6, "not run:abcdef01"),
    ],
)
def test_bad_flags_are_one_line_and_an_exit_code(
    served: Served, arguments: tuple[str, ...], code: int, words: str
) -> None:
    found, output, errors = run_cli("generate", str(served.root), PROMPT, *arguments)
    assert (found, output) == (code, "")
    assert words in errors.splitlines()[0] and errors.startswith("error: ") and "Traceback" not in errors


def test_a_router_of_another_run_ends_the_command_with_8(tmp_path: Path) -> None:
    served = make_served(tmp_path, router=random_router(TIED.width, seed=0, path_count=9))
    code, _, errors = run_cli("generate", str(served.root), PROMPT)
    assert code == 8 and errors.startswith("error: a router of another run")


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: None], ids=["empty", "missing"])
def test_a_folder_without_a_run_is_left_as_it_was(tmp_path: Path, make: Callable[[Path], None]) -> None:
    folder = tmp_path / "nothing"
    make(folder)
    code, _, errors = run_cli("generate", str(folder), PROMPT)
    assert code == 2 and "holds no run" in errors
    assert not folder.exists() or not any(folder.iterdir())


def test_the_end_of_a_document_ends_the_text(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Tokenizer(TOKENIZER).encode(PROMPT)
    text = plain_greedy(served.model(PathId((0, 0, 0))), tokens, 40)
    assert len(text) == 40
    monkeypatch.setattr("bootstrap.use.generate.END_ID", text[9])
    written = write(served, replace(GREEDY, path="P0-0-0")).text
    assert written == decode(text[: text.index(text[9])])
    assert END not in written
