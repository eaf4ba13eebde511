"""Campaigns and criteria: what is accepted, and what a person is told when it is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.measures import MEASURES
from harness.campaign.generated_model import model_config
from harness.campaign.plan import Plan, make_plan
from harness.campaign.reading import (
    bundled_campaigns,
    load_campaign,
    load_criteria,
    read_model_config,
)
from harness.campaign.sections import GATES
from harness.cli.main import main
from harness.errors import PlanError
from tests.campaign_text import SMALL_CAMPAIGN, edited

PROFILES = ("production", "cpu-demo", "published")


def plan_of(path: Path, **options: Any) -> Plan:
    """What the command line does with a campaign file, without generating a model."""
    campaign, text = load_campaign(path)
    config = model_config(campaign.model.generated)
    return make_plan(campaign, text, model_config=config, label=str(path), **options)


def problems_of(tmp_path: Path, text: str, **options: Any) -> list[str]:
    path = tmp_path / "campaign.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PlanError) as error:
        plan_of(path, **options)
    return error.value.problems


# --- what is accepted -------------------------------------------------------


@pytest.mark.parametrize("name", bundled_campaigns())
def test_bundled_campaigns_can_be_planned(name: str) -> None:
    campaign, text = load_campaign(name)
    plan = make_plan(campaign, text, model_config=model_config(campaign.model.generated))
    assert [trial.index for trial in plan.trials()] == list(range(len(list(plan.trials()))))


@pytest.mark.parametrize("profile", PROFILES)
def test_bundled_profiles_are_complete(profile: str) -> None:
    found, _text = load_criteria(profile)
    assert found.criteria
    for criterion in found.criteria.values():
        assert criterion.measure in MEASURES
        assert criterion.rationale


def test_the_production_profile_alone_is_signable() -> None:
    assert [p for p in PROFILES if load_criteria(p)[0].signable] == ["production"]


def test_the_small_campaign_is_good(tmp_path: Path) -> None:
    path = tmp_path / "campaign.toml"
    path.write_text(SMALL_CAMPAIGN, encoding="utf-8")
    plan = plan_of(path)
    assert plan.gates == ("g1", "g3")
    # 328 prompt + 4 output tokens are 20.75 blocks of 16; 327 // 16 = 20 whole blocks can be
    # restored.
    assert plan.sizes.session_blocks == 21
    assert plan.sizes.cached_tokens_per_session == 320
    # 2 (K, V) x 2 layers x 1 head x 32 x 4 bytes = 512 bytes per token.
    assert plan.sizes.kv_bytes_per_token == 512
    assert plan.sizes.working_set_bytes == 9 * 328 * 512
    assert plan.sizes.working_set_ratio == 9 * 328 / 1024


def test_trials_run_arm_by_arm_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "campaign.toml"
    path.write_text(SMALL_CAMPAIGN, encoding="utf-8")
    waves = [
        f"cold_recovery-c{level}-r{repetition}" for level in (1, 2) for repetition in (1, 2, 3)
    ]
    assert [trial.id.partition("-")[2] for trial in plan_of(path).trials()] == [
        f"{arm}-{workload}"
        for arm, last in (
            ("tiered_disk", ["oracle-c1-r1"]),
            ("hbm_only", ["fits_in_hbm-c1-r1"]),
            ("recompute", []),
        )
        for workload in ("arrival-c1-r1", "populate-c1-r1", *waves, "steady-c2-r1", *last)
    ]


ROUNDS = (("repetitions = 3", 'repetitions = 6\nrestart = "look"'),)


def test_each_look_is_a_round_with_the_arms_in_the_other_order(tmp_path: Path) -> None:
    path = tmp_path / "campaign.toml"
    path.write_text(edited(*ROUNDS), encoding="utf-8")
    plan = plan_of(path)
    assert [(one.number, one.arms, list(one.repetitions)) for one in plan.rounds] == [
        (1, ("tiered_disk", "hbm_only", "recompute"), [1, 2, 3]),
        (2, ("recompute", "hbm_only", "tiered_disk"), [4, 5, 6]),
    ]
    second = [trial.id for trial in plan.trials_by_round[2]]
    # Three arms of 1 arrival, 1 populate, 6 waves, 1 steady window, and oracle and control cell.
    first_index = 3 * 9 + 2
    waves = [
        f"cold_recovery-c{level}-r{repetition}" for level in (1, 2) for repetition in (4, 5, 6)
    ]
    assert second == [
        f"{first_index + index:02d}-{name}"
        for index, name in enumerate(
            f"{arm}-{workload}"
            for arm in ("recompute", "hbm_only", "tiered_disk")
            for workload in ("populate-c1-r2", *waves)
        )
    ]
    assert [trial.id for trial in plan.trials()][first_index:] == second


def test_g1_alone_has_one_round(tmp_path: Path) -> None:
    path = tmp_path / "campaign.toml"
    path.write_text(edited(*ROUNDS), encoding="utf-8")
    plan = plan_of(path, gates=["g1"])
    assert [one.number for one in plan.rounds] == [1]
    assert {trial.workload for trial in plan.trials()} == {"arrival"}


def test_a_time_budget_needs_rounds(tmp_path: Path) -> None:
    text = edited(("repetitions = 3", "repetitions = 3\ntime_budget_s = 60.0"))
    (problem,) = problems_of(tmp_path, text)
    assert problem.endswith("time_budget_s: allowed with restart = 'look' only")


def test_a_gate_can_be_chosen(tmp_path: Path) -> None:
    path = tmp_path / "campaign.toml"
    path.write_text(SMALL_CAMPAIGN, encoding="utf-8")
    plan = plan_of(path, gates=["g1"])
    assert {trial.workload for trial in plan.trials()} == {"arrival"}


# --- what is refused --------------------------------------------------------

# (reason for the row, changes to the good file, what the message must name: key, found, allowed)
BAD: list[tuple[str, list[tuple[str, str]], list[str]]] = [
    (
        "unknown key of an arm",
        [('role = "hbm_only"', 'role = "hbm_only"\ncolour = "red"')],
        ["arms.hbm_only.colour", "'red'", "unknown key", "medium", "role"],
    ),
    (
        "unknown section",
        [("[cold_recovery]", "[surprise]\nx = 1\n\n[cold_recovery]")],
        ["surprise", "a table of 1 keys", "unknown key", "cold_recovery"],
    ),
    (
        "unknown key of the server",
        [("cpu_cores = 2", "cpu_cores = 2\ncores = 3")],
        ["server.cores", "3", "unknown key", "cpu_cores"],
    ),
    (
        "unknown key of a criterion override",
        [("[cold_recovery]", "[criteria.kv_size]\nfloor = 1.0\ntarget = 1.0\n\n[cold_recovery]")],
        ["criteria.kv_size.floor", "1.0", "unknown key", "target"],
    ),
    (
        "wrong type: text for a number",
        [("seed = 7", 'seed = "seven"')],
        ["seed", "'seven'", "valid integer"],
    ),
    (
        "wrong type: bool for a number",
        [("cpu_cores = 2", "cpu_cores = true")],
        ["server.cpu_cores", "True", "valid integer"],
    ),
    (
        "wrong type: one level instead of a list",
        [("levels = [1, 2]", "levels = 2")],
        ["cold_recovery.levels", "found 2", "valid list"],
    ),
    (
        "missing required key",
        [("seed = 7\n", "")],
        ["seed", "found nothing", "required"],
    ),
    (
        "missing section",
        [(SMALL_CAMPAIGN[SMALL_CAMPAIGN.index("[cold_recovery]") :], "")],
        ["cold_recovery", "found nothing", "required"],
    ),
    (
        "unknown profile",
        [('profile = "cpu-demo"', 'profile = "demo"')],
        ["profile", "'demo'", "cpu-demo, production, published"],
    ),
    (
        "unknown role",
        [('role = "hbm_only"', 'role = "baseline"')],
        ["arms.hbm_only.role", "'baseline'", "'recompute', 'hbm_only' or 'tiered'"],
    ),
    (
        "unknown medium",
        [('medium = "disk"', 'medium = "tape"')],
        ["arms.tiered_disk.medium", "'tape'", "'host' or 'disk'"],
    ),
    (
        "tiered without a medium",
        [('medium = "disk"\n', "")],
        ["arms.tiered_disk", "medium", "found none", "'host' or 'disk'"],
    ),
    (
        "medium on a baseline",
        [('role = "hbm_only"', 'role = "hbm_only"\nmedium = "host"')],
        ["arms.hbm_only", "found medium", "'hbm_only'"],
    ),
    (
        "kind url without url",
        [('role = "hbm_only"', 'role = "hbm_only"\nkind = "url"')],
        ["arms.hbm_only", "url", "found none"],
    ),
    (
        "arguments for a server of somebody else",
        [
            (
                'role = "hbm_only"',
                'role = "hbm_only"\nkind = "url"\nurl = "http://x"\nargs = ["-x"]',
            )
        ],
        ["arms.hbm_only", "found args", "'vllm'"],
    ),
    (
        "name that is no directory name",
        [('name = "small"', 'name = "../small"')],
        ["name", "'../small'", "pattern"],
    ),
    (
        "arm name that is no directory name",
        [("[arms.hbm_only]", '[arms."../hbm"]')],
        ["arms.../hbm", "'../hbm'", "pattern"],
    ),
    (
        "levels not ascending",
        [("levels = [1, 2]", "levels = [2, 1]")],
        ["cold_recovery", "levels", "[2, 1]", "ascending"],
    ),
    (
        "a level twice",
        [("levels = [1, 2]", "levels = [2, 2]")],
        ["cold_recovery", "levels", "[2, 2]", "ascending"],
    ),
    (
        "no level",
        [("levels = [1, 2]", "levels = []")],
        ["cold_recovery.levels", "found []", "at least 1"],
    ),
    (
        "level zero",
        [("levels = [1, 2]", "levels = [0, 2]")],
        ["cold_recovery.levels.0", "found 0", "greater than 0"],
    ),
    (
        "too few repetitions for the profile",
        [("repetitions = 3", "repetitions = 2")],
        ["cold_recovery.repetitions", "found 2", "a look of profile cpu-demo: 3, 6"],
    ),
    (
        "fewer sessions than a level reads",
        [("sessions = 9\n", "sessions = 5\n")],
        ["cold_recovery.sessions", "found 5", "6 different sessions"],
    ),
    (
        "working set below twice the device cache",
        [("device_kv_tokens = 1024", "device_kv_tokens = 1488")],
        ["cold_recovery.sessions", "1.98 x", "at least 2 x"],
    ),
    (
        "wave larger than the device cache",
        [("device_kv_tokens = 1024", "device_kv_tokens = 640")],
        ["server.device_kv_tokens", "40 blocks", "at least 43"],
    ),
    (
        "control cell larger than the device cache",
        [("fits_sessions = 3", "fits_sessions = 4")],
        ["cold_recovery.fits_sessions", "found 4", "85", "64 blocks"],
    ),
    (
        "host pool below the working set",
        [('medium = "disk"', 'medium = "host"'), ('directory = "{tier_dir}"\n', "")],
        ["arms.tiered_disk", "host_pool_bytes", "65536", "1511424"],
    ),
    (
        "tier directory of an arm that has none",
        [('medium = "disk"', 'medium = "host"')],
        ["arms.tiered_disk", "kv_transfer", "found {tier_dir}", "'disk'"],
    ),
    (
        "cold reset that deletes the files under test",
        [('reset_scope = "host"', 'reset_scope = "all"')],
        ["arms.tiered_disk", "reset_scope", "found 'all'", "'host'"],
    ),
    (
        "prompt is a multiple of the block",
        [("prompt_tokens = 328", "prompt_tokens = 336")],
        ["cold_recovery.prompt_tokens", "found 336", "16 tokens", "remainder"],
    ),
    (
        "prompt longer than the model",
        [('dtype = "float32"', 'dtype = "float32"\nmax_position = 331')],
        ["cold_recovery.prompt_tokens", "found 328 + 4", "allowed: 331"],
    ),
    (
        "unknown criterion override",
        [("[cold_recovery]", "[criteria.ttft]\ntarget = 0.1\n\n[cold_recovery]")],
        ["criteria.ttft", "cpu-demo", "ttft_reduction_vs_recompute"],
    ),
    (
        "override that is not a number",
        [("[cold_recovery]", "[criteria.kv_size]\ntarget = nan\n\n[cold_recovery]")],
        ["criteria.kv_size.target", "found nan", "finite number"],
    ),
    (
        "unknown gate",
        [('gates = ["g1", "g3"]', 'gates = ["g1", "g9"]')],
        ["gates.1", "'g9'", "'g1' or 'g3'"],
    ),
    (
        "no gate",
        [('gates = ["g1", "g3"]', "gates = []")],
        ["gates", "found []", "at least 1"],
    ),
    (
        "no arms",
        [
            (
                SMALL_CAMPAIGN[SMALL_CAMPAIGN.index("[arms.t") : SMALL_CAMPAIGN.index("[cold")],
                "[arms]\n\n",
            )
        ],
        ["arms", "a table of 0 keys", "at least 1"],
    ),
    (
        "no candidate among the arms",
        [
            (
                SMALL_CAMPAIGN[
                    SMALL_CAMPAIGN.index("[arms.tiered_disk]") : SMALL_CAMPAIGN.index("[arms.hbm")
                ],
                "",
            )
        ],
        ["arms", "found no arm with role 'tiered'", "required"],
    ),
    (
        "no arm to compare with",
        [
            (
                SMALL_CAMPAIGN[
                    SMALL_CAMPAIGN.index("[arms.recompute]") : SMALL_CAMPAIGN.index("[cold")
                ],
                "",
            )
        ],
        ["arms", "found no arm", "'recompute'", "required by ttft_reduction_vs_recompute"],
    ),
    (
        "another format",
        [("format = 1", "format = 2")],
        ["format", "found 2", "allowed: 1"],
    ),
    (
        "steady window of discarded cycles only",
        [("steady_cycles = 3", "steady_cycles = 2")],
        ["cold_recovery", "steady_cycles", "found 2", "at least 3"],
    ),
    (
        "unknown key of the architecture",
        [("num_layers = 2", "num_layers = 2\ncolour = 3")],
        ["model", "'colour'", "num_layers"],
    ),
    (
        "unknown dtype of the architecture",
        [('dtype = "float32"', 'dtype = "int4"')],
        ["model", "dtype", "'int4'", "bfloat16, float32"],
    ),
    (
        "negative size of the architecture",
        [("num_layers = 2", "num_layers = -2")],
        ["model", "num_layers", "-2", "above 0"],
    ),
    (
        "heads that do not divide",
        [("num_kv_heads = 1", "num_kv_heads = 3")],
        ["model", "num_kv_heads", "found 3", "divisor of num_attention_heads = 2"],
    ),
    (
        "vocabulary without room for bytes",
        [("vocab_size = 512", "vocab_size = 256")],
        ["model", "vocab_size", "256", "at least 257"],
    ),
    (
        "model directory without its name",
        [('kind = "generated"', 'kind = "path"')],
        ["model", "path", "found none"],
    ),
    ("not TOML", [("seed = 7", "seed = = 7")], ["not TOML", "line 5"]),
    ("key twice", [("seed = 7", "seed = 7\nseed = 8")], ["not TOML", "line 6"]),
    (
        "deadline of nothing",
        [("cpu_cores = 2", "cpu_cores = 2\nready_deadline_s = 0.0")],
        ["server.ready_deadline_s", "0.0", "greater than 0"],
    ),
]


@pytest.mark.parametrize(
    ("changes", "named"), [pytest.param(row[1], row[2], id=row[0]) for row in BAD]
)
def test_a_bad_campaign_says_what_is_wrong(
    changes: list[tuple[str, str]], named: list[str], tmp_path: Path
) -> None:
    problems = problems_of(tmp_path, edited(*changes))
    place = re.compile(re.escape(f"{tmp_path}/campaign.toml") + r"(:[0-9]+)?: ")
    assert all(place.match(problem) for problem in problems)
    assert [p for p in problems if all(text in p for text in named)], problems


def test_all_problems_of_a_file_come_at_once(tmp_path: Path) -> None:
    text = edited(
        ("seed = 7", 'seed = "seven"'),
        ('role = "hbm_only"', 'role = "baseline"'),
        ("levels = [1, 2]", "levels = []"),
    )
    keys = [problem.split(": ")[1] for problem in problems_of(tmp_path, text)]
    assert sorted(keys) == ["arms.hbm_only.role", "cold_recovery.levels", "seed"]


def test_all_impossible_numbers_come_at_once(tmp_path: Path) -> None:
    text = edited(
        ("repetitions = 3", "repetitions = 2"),
        ("prompt_tokens = 328", "prompt_tokens = 336"),
        ("fits_sessions = 3", "fits_sessions = 4"),
    )
    keys = [problem.split(": ")[1] for problem in problems_of(tmp_path, text)]
    assert sorted(keys) == [
        "cold_recovery.fits_sessions",
        "cold_recovery.prompt_tokens",
        "cold_recovery.repetitions",
    ]


def test_gates_that_the_campaign_lacks_may_still_be_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "campaign.toml"
    path.write_text(edited(('gates = ["g1", "g3"]', 'gates = ["g1"]')), encoding="utf-8")
    assert plan_of(path, gates=["g3"]).gates == ("g3",)


# --- files ------------------------------------------------------------------


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.toml: cannot read the campaign file: .*No such"):
        load_campaign(tmp_path / "none.toml")


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "bytes.toml"
    path.write_bytes(b"name = '\xff\xfe'")
    with pytest.raises(PlanError, match=r"bytes\.toml: cannot read the campaign file: .*utf-8"):
        load_campaign(path)


def test_a_directory_is_not_a_campaign(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot read the campaign file: .*directory"):
        load_campaign(tmp_path)


def test_an_unknown_bundled_name_lists_the_known_ones() -> None:
    with pytest.raises(PlanError, match=r"cpu-dmeo: no such campaign file; allowed: .*cpu-demo"):
        load_campaign("cpu-dmeo")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(None, "cannot read the criteria file: .*No such", id="not there"),
        pytest.param("format = = 1", "not TOML", id="not TOML"),
        pytest.param("format = 2", "format: found 2; allowed: 1", id="another format"),
        pytest.param("format = 1", "profile: found 'cpu-demo'; allowed, by .*: none", id="empty"),
        pytest.param(
            "format = 1\n[profiles.cpu-demo]\nsignable = true\n",
            r"criteria.toml:2: profiles\.cpu-demo\.label: found nothing; required",
            id="incomplete",
        ),
    ],
)
def test_bad_criteria_say_what_is_wrong(text: str | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "criteria.toml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(PlanError, match=reason) as error:
        load_criteria("cpu-demo", path)
    assert all(str(path) in problem for problem in error.value.problems)


def test_a_criterion_with_an_unknown_reason_code(tmp_path: Path) -> None:
    _profile, text = load_criteria("cpu-demo")
    path = tmp_path / "criteria.toml"
    path.write_text(text.replace("oracle.noise_exceeded", "oracle.noisy"), encoding="utf-8")
    with pytest.raises(PlanError) as error:
        load_criteria("cpu-demo", path)
    (problem,) = error.value.problems
    assert "criteria.oracle_bounded: reason: found 'oracle.noisy'; allowed: " in problem


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"model\.path: cannot read .*config\.json: .*No such"):
        read_model_config(tmp_path / "none")


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_model_config_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(PlanError, match=r"model\.path: "):
        read_model_config(tmp_path)


def test_a_model_config_without_a_vocabulary() -> None:
    campaign, text = load_campaign("cpu-demo")
    config = model_config(campaign.model.generated)
    del config["vocab_size"]
    with pytest.raises(PlanError, match=r"config\.json has no 'vocab_size'"):
        make_plan(campaign, text, model_config=config)


# --- the command line -------------------------------------------------------


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("KVGATE_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    return home


@pytest.mark.parametrize("verb", ["plan", "run", "doctor"])
def test_a_bad_campaign_is_a_usage_error_with_a_line_per_problem(
    verb: str, empty_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(edited(("seed = 7", 'seed = "seven"'), ("levels = [1, 2]", "levels = []")))
    assert main([verb, str(path)]) == 64
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        f"kvgate: {path}:5: seed: found 'seven'; allowed: should be a valid integer",
        f"kvgate: {path}:47: cold_recovery.levels: found []; allowed: list should have at least "
        "1 item after validation, not 0",
    ]
    assert not empty_home.exists()
    assert not (tmp_path / "runs").exists()


def test_an_impossible_campaign_starts_nothing(
    empty_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(edited(("repetitions = 3", "repetitions = 2")))
    assert main(["run", str(path)]) == 64
    assert "cold_recovery.repetitions: found 2" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_model_path_that_is_missing_is_a_usage_error(
    empty_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.toml"
    text = edited(('kind = "generated"', f'kind = "path"\npath = "{tmp_path}/model"'))
    path.write_text(text)
    assert main(["run", str(path)]) == 64
    assert "model.path: cannot read" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_measure_that_nobody_computes_is_told_before_a_run(
    empty_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _profile, text = load_criteria("cpu-demo")
    criteria = tmp_path / "criteria.toml"
    criteria.write_text(text.replace('measure = "ttft_reduction"', 'measure = "ttft"'))
    path = tmp_path / "small.toml"
    path.write_text(SMALL_CAMPAIGN)
    assert main(["run", str(path), "--criteria", str(criteria)]) == 64
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "criteria.ttft_reduction_vs_recompute.measure: found 'ttft'; allowed: " in lines[0]
    assert not (tmp_path / "runs").exists()


def test_every_gate_has_a_name() -> None:
    assert GATES == ("g1", "g3")
