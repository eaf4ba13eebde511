"""Sizes chosen by a calibration, against figures worked by hand."""

from __future__ import annotations

import tomllib

import pytest

from harness.campaign.reading import load_campaign, parse_campaign
from harness.campaign.sections import Campaign, Size
from harness.campaign.sizing import (
    Calibration,
    calibration_text,
    choose,
    own_size,
    predict,
    prefill_operations,
    sized_text,
)
from harness.errors import PlanError
from tests.sealed_runs import demo_plan


@pytest.fixture
def campaign() -> Campaign:
    return load_campaign("cpu-demo")[0]


OWN = Size(num_layers=4, intermediate_size=1024, prompt_tokens=4160)
SMALL = Size(num_layers=2, intermediate_size=1024, prompt_tokens=2112)


def test_the_file_has_the_size_of_the_calibration(campaign: Campaign) -> None:
    assert own_size(campaign) == OWN


def test_operations_of_a_prefill(campaign: Campaign) -> None:
    # Per layer: query and output 512 x 512 each, key and value 512 x 256 each, MLP 3 x 512 x 1024.
    weights = 2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 1024
    # Attention: on average half the prompt is earlier; two products of 512 elements, two each.
    per_token = 2 * weights + 4 * 512 * 4160 / 2
    assert prefill_operations(campaign, OWN) == 4 * 4160 * per_token


def test_a_prediction_keeps_the_fixed_part_and_scales_the_rest(campaign: Campaign) -> None:
    measured = Calibration(prefill_s=0.52, restore_s=0.04, resident_s=0.02, start_s=25.0)
    found = predict(campaign, measured, SMALL)
    work = prefill_operations(campaign, SMALL) / prefill_operations(campaign, OWN)
    assert found.prefill_s == pytest.approx(0.02 + 0.5 * work)
    # Half the layers, 2112 of 4160 tokens.
    assert found.restore_s == pytest.approx(0.02 + 0.02 * 0.5 * 2112 / 4160)
    # Four arms x (16 sessions + 4 to warm up + arrival); two baselines x (7 x 3 + 4 x 4 waves);
    # 3 sessions that fit, 2 of the controls in each of two tiered arms: 165 prefills.
    assert found.round_s == pytest.approx(4 * 25 + 165 * found.prefill_s + 40)


def test_the_file_s_own_size_is_predicted_as_it_was_measured(campaign: Campaign) -> None:
    measured = Calibration(prefill_s=0.5, restore_s=0.04, resident_s=0.02, start_s=25.0)
    found = predict(campaign, measured, OWN)
    assert (found.prefill_s, found.restore_s) == (0.5, 0.04)
    assert found.contrast == 12.5


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        pytest.param(Calibration(3.0, 0.13, 0.05, 55.0), (2, 1024, 2112), id="two slow cores"),
        pytest.param(Calibration(0.9, 0.05, 0.025, 27.0), (4, 1024, 4160), id="two AVX2 cores"),
        pytest.param(Calibration(0.47, 0.041, 0.022, 27.0), (4, 4096, 4160), id="AVX-512"),
        pytest.param(
            Calibration(0.5, 0.4, 0.02, 27.0), (4, 4096, 4160), id="a slow disk: clearest"
        ),
        pytest.param(
            Calibration(30.0, 0.9, 0.5, 90.0), (2, 1024, 2112), id="nothing fits: shortest"
        ),
    ],
)
def test_the_least_work_that_shows_the_contrast_is_chosen(
    campaign: Campaign, measured: Calibration, expected: tuple[int, int, int]
) -> None:
    chosen, predictions = choose(campaign, measured)
    size = chosen.size
    assert (size.num_layers, size.intermediate_size, size.prompt_tokens) == expected
    assert campaign.sizing is not None
    assert [p.size for p in predictions] == campaign.sizing.choices


def test_a_sized_campaign_is_the_file_but_for_its_sizes() -> None:
    campaign, text = load_campaign("cpu-demo")
    found = sized_text(text, campaign, SMALL, why="two\nlines")
    assert found.startswith("# two\n# lines\n")
    sized = parse_campaign(found)
    assert own_size(sized) == SMALL
    assert sized.sizing is None
    # A session has 17 blocks instead of 33: 140 x 17 / 33 = 72.1.
    assert sized.server.device_kv_tokens == 73 * 128
    # Half the layers and 2112 of 4160 tokens: 0.2538 of the KV.
    pools = [arm.host_pool_bytes for arm in sized.arms.values()]
    assert pools == [42588318, 272565233, None, None]
    before, after = tomllib.loads(text), tomllib.loads(found)
    for content in (before, after):
        content.pop("sizing", None)
        content["model"]["architecture"] |= {"num_layers": 0, "intermediate_size": 0}
        content["cold_recovery"]["prompt_tokens"] = content["server"]["device_kv_tokens"] = 0
        for arm in content["arms"].values():
            extra = arm.get("kv_transfer", {}).get("kv_connector_extra_config", {})
            extra.pop("host_pool_bytes", None)
    assert before == after


@pytest.mark.parametrize("index", range(5))
def test_every_choice_makes_a_possible_plan(campaign: Campaign, index: int) -> None:
    assert campaign.sizing is not None
    text = load_campaign("cpu-demo")[1]
    size = campaign.sizing.choices[index]
    plan = demo_plan(sized_text(text, campaign, size, why="test"))
    assert plan.sizes.working_set_ratio is not None
    assert plan.sizes.working_set_ratio > 3


def test_a_calibration_is_the_disk_arm_alone_with_a_few_sessions() -> None:
    campaign, text = load_campaign("cpu-demo")
    found = parse_campaign(calibration_text(text, campaign))
    assert found.name == "cpu-demo-calibration"
    assert list(found.arms) == ["tiered_disk"]
    assert found.arms["tiered_disk"] == campaign.arms["tiered_disk"]
    assert found.model == campaign.model
    assert (found.cold_recovery.levels, found.cold_recovery.sessions) == ([1], 4)


def test_sizes_of_real_weights_cannot_be_chosen() -> None:
    text = load_campaign("cpu-demo")[1].replace('kind = "generated"', 'kind = "path"\npath = "/m"')
    with pytest.raises(PlanError, match=r"sizing: allowed with model\.kind = 'generated' only"):
        parse_campaign(text)
