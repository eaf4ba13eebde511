"""`kvgate runs`: what is there and in which state; prune removes what it may, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli.main import main
from harness.run.listing import RunState, list_runs, prune, run_state
from harness.run.ownership import RunOwner
from tests.campaign_text import SMALL_CAMPAIGN
from tests.sealed_runs import build_run, demo_plan


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_run(tmp_path_factory.mktemp("sealed") / "runs", plan=demo_plan(SMALL_CAMPAIGN))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def make(root: Path, name: str, campaign: str = "site", *files: str) -> Path:
    path = root / campaign / name
    (path / "trials").mkdir(parents=True)
    for file in files:
        (path / file).parent.mkdir(exist_ok=True)
        (path / file).write_text('{"verdict": "PASS"}')
    return path


def names(root: Path, campaign: str = "site") -> list[str]:
    return sorted(path.name for path in (root / campaign).iterdir())


@pytest.mark.parametrize(
    ("files", "state"),
    [
        ((), RunState.PLANNED),
        (("seal.json",), RunState.SEALED),
        (("seal.json", "verdicts/1.json"), RunState.JUDGED),
        (("seal.json", "verdicts/1.json", "report/signoff.html"), RunState.REPORTED),
    ],
)
def test_the_state_is_how_far_a_run_has_come(
    files: tuple[str, ...], state: RunState, root: Path
) -> None:
    assert run_state(make(root, "20261130T120000Z", "site", *files)) is state


def test_a_lock_tells_live_from_dead(root: Path) -> None:
    path = make(root, "20261130T120000Z")
    with RunOwner(path):
        assert run_state(path) is RunState.LIVE
    assert run_state(path) is RunState.DEAD


def test_runs_are_listed_in_time_with_verdict_and_size(root: Path) -> None:
    make(root, "20261130T120000Z-10", "site", "seal.json")
    make(root, "20261130T120000Z-2", "site", "seal.json", "verdicts/1.json")
    make(root, "20261130T120000Z", "site", "seal.json")
    listed = [(run.path.name, run.verdict) for run in list_runs(root)]
    assert listed == [
        ("20261130T120000Z", None),
        ("20261130T120000Z-2", "PASS"),
        ("20261130T120000Z-10", None),
    ]


def test_prune_keeps_the_newest_of_each_campaign(root: Path) -> None:
    for day in (1, 2, 3):
        make(root, f"2026113{day}T120000Z", "a", "seal.json")
    make(root, "20261129T120000Z", "b", "seal.json")
    gone = [path.name for path, _size in prune(root, keep=1)]
    assert gone == ["20261131T120000Z", "20261132T120000Z"]
    assert (names(root, "a"), names(root, "b")) == (["20261133T120000Z"], ["20261129T120000Z"])


def test_prune_never_removes_live_dead_or_foreign(root: Path, tmp_path: Path) -> None:
    live, dead = make(root, "20261101T120000Z"), make(root, "20261102T120000Z")
    make(root, "20261103T120000Z", "site", "seal.json")
    make(root, "my-notes", "site", "seal.json")
    (root / "site" / "20261104T120000Z").mkdir()  # named like a run, but holds none
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "trials").mkdir(parents=True)
    (root / "site" / "20261105T120000Z").symlink_to(elsewhere)
    RunOwner(dead).close()
    with RunOwner(live):
        gone = [path.name for path, _size in prune(root, keep=0)]
    assert gone == ["20261103T120000Z"]
    assert names(root) == [
        live.name,
        dead.name,
        "20261104T120000Z",
        "20261105T120000Z",
        "my-notes",
    ]
    assert elsewhere.is_dir()


def test_the_verb_lists_and_prunes(
    sealed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    root = sealed.parents[1]
    assert main(["runs", "--runs", str(root)]) == 0
    assert f"{sealed.name} │ sealed" in capsys.readouterr().out
    main(["judge", str(sealed)])
    capsys.readouterr()
    assert main(["runs", "list", "--runs", str(root)]) == 0
    assert f"{sealed.name} │ judged │ PASS" in capsys.readouterr().out
    assert main(["runs", "prune", "--runs", str(root), "--keep", "1"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["runs", "prune", "--runs", str(root), "--keep", "0"]) == 0
    assert f"removed {sealed}" in capsys.readouterr().out.replace("\n", "")
    assert not sealed.exists()


def test_prune_without_a_number_is_a_usage_error(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "prune", "--runs", str(root)]) == 64
    assert "found no --keep; required" in capsys.readouterr().err


def test_no_runs_directory_is_an_empty_list(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "none") == []
