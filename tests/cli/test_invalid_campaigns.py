"""Every invalid campaign of the test set through plan, doctor and run: one message, exit 64."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli.main import main
from tests.campaign.test_plan import BAD
from tests.campaign_text import SMALL_CAMPAIGN, edited

REPOSITORY = Path(__file__).resolve().parents[2]
EXTRA = "arms.tiered_disk.kv_transfer.kv_connector_extra_config"


def url_arm(url: str, more: str = "") -> list[tuple[str, str]]:
    return [
        (
            'role = "hbm_only"',
            f'role = "hbm_only"\nkind = "url"\nurl = "{url}"{more}',
        )
    ]


ADDRESS = "allowed: http(s)://host[:port][/path], port 1 to 65535"
# Changes to the good campaign and the whole message behind the file's name.
LATER: list[tuple[str, list[tuple[str, str]], str]] = [
    (
        "url without scheme",
        url_arm("localhost:8000"),
        ":42: arms.hbm_only.url: found 'localhost:8000', no scheme; "
        f"{ADDRESS}; did you mean 'http://localhost:8000'?",
    ),
    (
        "url of another scheme",
        url_arm("htpp://host"),
        f":42: arms.hbm_only.url: found 'htpp://host', scheme 'htpp'; {ADDRESS}; "
        "did you mean 'http'?",
    ),
    (
        "url with an impossible port",
        url_arm("http://host:99999"),
        f":42: arms.hbm_only.url: found 'http://host:99999': port out of range 0-65535; {ADDRESS}",
    ),
    (
        "url without a host",
        url_arm("http://:8000"),
        f":42: arms.hbm_only.url: found 'http://:8000'; {ADDRESS}",
    ),
    (
        "a password in the url, which would be evidence",
        url_arm("http://me:secret@host"),
        ":42: arms.hbm_only.url: found a user or password in the url; allowed: api_key_env or "
        "api_key_file",
    ),
    (
        "python of a server that is not started",
        url_arm("http://host", '\npython = "/usr/bin/python3"'),
        ":43: arms.hbm_only.python: found '/usr/bin/python3' with kind = 'url'; allowed with "
        "kind = 'vllm': nothing is started from it",
    ),
    (
        "a url without its kind",
        [('role = "hbm_only"', 'role = "hbm_only"\nurl = "http://host"')],
        ":41: arms.hbm_only.url: found 'http://host' with kind = 'vllm'; allowed with kind = "
        "'url': set kind = 'url' to ask a server that runs already",
    ),
    (
        "a port that is none",
        [("cpu_cores = 2", "cpu_cores = 2\nport = 99999")],
        ":25: server.port: found 99999; allowed: a TCP port, 1 to 65535",
    ),
    (
        "a size in words",
        [("host_pool_bytes = 65536", 'host_pool_bytes = "160MiB"')],
        f":35: {EXTRA}.host_pool_bytes: found '160MiB'; allowed: an integer of at least 1, in "
        "bytes; did you mean 167772160?",
    ),
    (
        "a setting that the bundled connector does not know",
        [("host_pool_bytes = 65536", "host_pool_bytes = 65536\nread_threads = 4")],
        f":36: {EXTRA}.read_threads: found an unknown key; allowed: ",
    ),
    (
        "a misspelt declared key",
        [('declared = ["connector", "connector_config"]', 'declared = ["conector"]')],
        ":29: arms.tiered_disk.declared: found 'conector', which no server states; allowed: keys "
        "of `effective` in server.json; did you mean 'connector'?",
    ),
    (
        "a declared key that can be no name",
        [('declared = ["prefix_caching"]', 'declared = ["prefix caching"]')],
        ":44: arms.recompute.declared: found 'prefix caching'; allowed: names of effective keys",
    ),
    (
        "an argument that the harness gives itself",
        [('args = ["--dtype", "float32"]', 'args = ["--served-model-name=x"]')],
        ":21: server.args: found '--served-model-name=x'; allowed: none of --model, "
        "--served-model-name, --host, --port, which the harness gives itself",
    ),
    (
        "a model that is not there",
        [
            (
                SMALL_CAMPAIGN[
                    SMALL_CAMPAIGN.index('kind = "gen') : SMALL_CAMPAIGN.index("[server]")
                ],
                'kind = "path"\npath = "/nonexistent/model"\n\n',
            )
        ],
        ":9: model.path: cannot read /nonexistent/model/config.json: ",
    ),
    (
        "a misspelt role",
        [('role = "hbm_only"', 'role = "hbm_onyl"')],
        ":40: arms.hbm_only.role: found 'hbm_onyl'; allowed: 'recompute', 'hbm_only' or 'tiered'; "
        "did you mean 'hbm_only'?",
    ),
    (
        "a misspelt key",
        [("repetitions = 3", "repetition = 3")],
        ":48: cold_recovery.repetition: found 3, an unknown key; allowed: fits_sessions, levels, "
        "oracle_sessions, output_tokens, prompt_tokens, repetitions, restart, sessions, "
        "steady_cycles, time_budget_s; did you mean 'repetitions'?",
    ),
    (
        "a misspelt profile",
        [('profile = "cpu-demo"', 'profile = "cpu_demo"')],
        ":3: profile: found 'cpu_demo'; allowed, by criteria.toml: cpu-demo, production, "
        "published; did you mean 'cpu-demo'?",
    ),
    (
        "a deadline in words",
        [("cpu_cores = 2", 'cpu_cores = 2\nready_deadline_s = "5 min"')],
        ":25: server.ready_deadline_s: found '5 min'; allowed: should be a valid number, in "
        "seconds",
    ),
]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVGATE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(verb: str, campaign: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a verb writes to stderr about a campaign; asserts exit 64 and nothing else shown."""
    assert main([verb, campaign]) == 64
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Traceback" not in shown.err
    return shown.err


@pytest.mark.parametrize("changes", [pytest.param(row[1], id=row[0]) for row in [*BAD, *LATER]])
def test_the_same_message_from_every_verb(
    changes: list[tuple[str, str]], site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / "bad.toml").write_text(edited(*changes), encoding="utf-8")
    messages = {told(verb, "bad.toml", capsys) for verb in ("plan", "doctor", "run")}
    (message,) = messages
    assert all(re.match(r"kvgate: bad\.toml(:\d+)?: ", line) for line in message.splitlines())
    assert not (site / "runs").exists()


@pytest.mark.parametrize(
    ("changes", "expected"), [pytest.param(row[1], row[2], id=row[0]) for row in LATER]
)
def test_what_run_would_refuse_is_named_by_plan(
    changes: list[tuple[str, str]],
    expected: str,
    site: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (site / "bad.toml").write_text(edited(*changes), encoding="utf-8")
    lines = told("plan", "bad.toml", capsys).splitlines()
    assert [line for line in lines if line.startswith(f"kvgate: bad.toml{expected}")], lines


@pytest.mark.parametrize("name", ["cpu-dmeo", "none.toml"])
def test_a_campaign_that_is_not_there(
    name: str, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = {told(verb, name, capsys) for verb in ("plan", "doctor", "run")}
    (message,) = messages
    assert ("did you mean 'cpu-demo'?" in message) is (name == "cpu-dmeo")


def test_a_key_of_a_later_vllm_can_be_declared(site: Path) -> None:
    text = edited(('declared = ["prefix_caching"]', 'declared = ["async_scheduling", "args.x-y"]'))
    (site / "good.toml").write_text(text, encoding="utf-8")
    assert main(["plan", "good.toml"]) == 0


@pytest.mark.parametrize("row", [LATER[0], LATER[8], LATER[10]], ids=lambda row: row[0])
def test_pytest_gates_say_the_same(row: tuple[str, list[tuple[str, str]], str], site: Path) -> None:
    _why, changes, expected = row
    (site / "bad.toml").write_text(edited(*changes), encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", str(REPOSITORY / "gates"), "--campaign", "bad.toml"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert result.returncode == pytest.ExitCode.USAGE_ERROR, result.stdout + result.stderr
    assert f"bad.toml{expected}" in result.stderr
    assert "Traceback" not in result.stderr
