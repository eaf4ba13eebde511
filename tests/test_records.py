"""Records go to JSON and back unchanged, and reading them is strict."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from harness import records, verdicts
from harness.records import (
    ErrorKind,
    Event,
    MetricSample,
    Outcome,
    PlannedRequest,
    ProcessFacts,
    PromptRecipe,
    Record,
    RecordError,
    RequestRecord,
    Schedule,
    ServerFacts,
    TrialFacts,
    canonical_json,
    digest,
    parse_json,
)
from harness.verdicts import (
    ArmSummary,
    Bound,
    Cause,
    Cell,
    Check,
    Compared,
    Consequence,
    CriterionResult,
    Finding,
    GateVerdict,
    Measurement,
    Reason,
    ReasonCode,
    SignOff,
    Unit,
    Verdict,
)

RECIPE = PromptRecipe(seed=7, session=3, tokens=40, vocab_size=512)
PLANNED = PlannedRequest(
    seq=1, user=2, session=3, turn=0, prompt=RECIPE, output_tokens=4, planned_offset_ns=5
)
REQUEST = RequestRecord(
    seq=1,
    user=2,
    session=3,
    phase="wave",
    prompt_tokens_planned=40,
    output_tokens_planned=4,
    planned_ns=1_000_000_000,
    outcome=Outcome.FAILED,
    sent_ns=1_000_000_001,
    first_token_ns=1_500_000_001,
    error_kind=ErrorKind.TRUNCATED,
    error_detail="cut after 3 of 4",
    http_status=200,
    cached_tokens=0,
    token_ids=(1, 2, 3),
    logprobs=(-0.5, -1.0, 0.0),
    token_ns=(1, 2, 3),
    token_counts=(1, 1, 1),
)
COMPARED = Compared(
    unit=Unit.SECONDS, candidate="inf", baseline=2.0, ratio="inf", inverse=0.0, required=0.2
)
MEASUREMENT = Measurement(
    name="ttft_reduction",
    unit=Unit.RATIO,
    value="inf",
    n=3,
    estimator="p50",
    low=0.5,
    high=0.75,
    confidence=0.95,
    repetitions=(0.5, "inf"),
    trials=("01-a",),
    detail={"ratios": [0.5, None], "nested": {"key": [1]}},
    compared=COMPARED,
)
REASON = Reason(ReasonCode.NOT_COLD, "12 tokens; allowed: 0", "trials/01/samples.jsonl")
RESULT = CriterionResult(
    criterion="ttft",
    gate="g3",
    title="TTFT",
    arm="tiered",
    baseline="recompute",
    level=None,
    verdict=Verdict.INCONCLUSIVE,
    bound=Bound(">=", 0.25, 0.22, 0.3, each=0.625, each_stop=-0.5, low=0.22, least_n=6),
    measurement=MEASUREMENT,
    reasons=(REASON,),
    decide="interval",
    rationale="why",
    missed=(2,),
)
CHECK = Check("cold", "01-a", False, "12", "0", (REASON,))
CELL = Cell(
    arm="tiered",
    workload="cold_recovery",
    level=4,
    repetitions=3,
    ttft_s=(0.1, "inf"),
    ttft_wave_s=(0.1,),
    ttft_estimator="mean",
    throughput_tokens_per_s=(1.5,),
    prompt_tokens=100,
    tokens_by_source={"device": 0, "disk": None},
    tier_read_bytes=None,
    disk_read_bytes=5,
    requests_ok=1,
    requests=2,
    valid=False,
    ttft_wave_s_mean="inf",
    throughput_tokens_per_s_mean=1.5,
)
ARM = ArmSummary(
    "tiered", "tiered", None, ("python",), {"dtype": "float32"}, ("connector",), ("vllm 1",)
)
FINDING = Finding("found 1", "seal.json", ("g3", "x[tiered]"))
CONSEQUENCE = Consequence(ReasonCode.NO_MEASUREMENT, Verdict.INCONCLUSIVE, (FINDING,))
CAUSE = Cause(ReasonCode.DISK_FULL, Verdict.INCONCLUSIVE, (FINDING,), (CONSEQUENCE,))
EVERY_RECORD: list[Record] = [
    RECIPE,
    PLANNED,
    Schedule("cold_recovery", "wave", (PLANNED,), logprobs=False, request_timeout_s=1.5),
    REQUEST,
    MetricSample(5, "cold", "prometheus", "x", None, {"tier": "disk"}, "absent"),
    Event(5, "cold", {"ok": True, "attempts": 2}),
    ProcessFacts(12, 345, "VLLM::EngineCore"),
    ServerFacts("a", "vllm", ("python",), {"A": "b"}, {"n": 1}, (ProcessFacts(1, 2, "p"),)),
    TrialFacts(3, "g3", "a", "steady", 4, 1, attempt=2, figures={"role": "tiered"}),
    REASON,
    MEASUREMENT,
    COMPARED,
    Bound("==", 0.0),
    RESULT,
    CHECK,
    GateVerdict("g3", Verdict.STOP, (RESULT,), (REASON,)),
    CELL,
    ARM,
    FINDING,
    CONSEQUENCE,
    CAUSE,
    SignOff(
        judge_version="1",
        campaign="c",
        profile="p",
        signable=False,
        label="l",
        verdict=Verdict.NOT_RUN,
        causes=(CAUSE,),
        gates=(),
        checks=(CHECK,),
        cells=(CELL,),
        arms=(ARM,),
        differences=({"key": "dtype", "declared": False},),
        plan={"gates": ["g3"]},
        overrides=(),
        not_tested=("much",),
        evidence_digest=None,
        criteria_digest="0" * 64,
    ),
]
REQUEST_JSON = REQUEST.to_json()


def test_every_record_class_has_a_sample_here() -> None:
    modules = {records.__name__, verdicts.__name__}
    classes = {c.__name__ for c in Record.__subclasses__() if c.__module__ in modules}
    assert {type(record).__name__ for record in EVERY_RECORD} == classes


@pytest.mark.parametrize("record", EVERY_RECORD, ids=lambda record: type(record).__name__)
def test_a_record_comes_back_from_json_unchanged(record: Record) -> None:
    text = canonical_json(record)
    assert type(record).from_json(parse_json(text)) == record
    assert canonical_json(type(record).from_json(parse_json(text))) == text


@pytest.mark.parametrize("record", EVERY_RECORD, ids=lambda record: type(record).__name__)
def test_an_unknown_key_is_refused_by_name(record: Record) -> None:
    name = type(record).__name__
    with pytest.raises(RecordError, match=f"{name}: unknown key 'surprise'"):
        type(record).from_json({**record.to_json(), "surprise": 1})


@pytest.mark.parametrize("record", EVERY_RECORD, ids=lambda record: type(record).__name__)
def test_a_missing_required_key_is_refused_by_name(record: Record) -> None:
    required = [
        f.name
        for f in dataclasses.fields(record)  # type: ignore[arg-type]
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    for key in required:
        value = record.to_json()
        del value[key]
        with pytest.raises(RecordError, match=f"{type(record).__name__}: missing key '{key}'"):
            type(record).from_json(value)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        pytest.param("seq", True, "expected int, found True", id="bool is no int"),
        pytest.param("seq", 1.0, "expected int, found 1.0", id="float is no int"),
        pytest.param("seq", "1", "expected int, found '1'", id="text is no int"),
        pytest.param("seq", None, "expected int, found None", id="absent where required"),
        pytest.param("phase", 3, "expected str, found 3", id="int is no text"),
        pytest.param("outcome", "fine", "'fine' is not one of ok, failed, unknown", id="enum"),
        pytest.param("outcome", [], "is not one of ok", id="list for an enum"),
        pytest.param("sent_ns", "soon", "'soon' is none of", id="text for int or none"),
        pytest.param("sent_ns", False, "False is none of", id="bool for int or none"),
        pytest.param("token_ids", {}, "expected a list, found dict", id="object for list"),
        pytest.param("token_ids", [1, "2"], "expected int, found '2'", id="wrong item"),
        pytest.param("logprobs", [math.nan], "expected a finite number, found nan", id="nan"),
        pytest.param("logprobs", [math.inf], "expected a finite number, found inf", id="inf"),
        pytest.param("logprobs", [True], "expected float, found True", id="bool is no float"),
    ],
)
def test_a_wrong_value_is_refused_naming_the_key(key: str, value: Any, reason: str) -> None:
    with pytest.raises(RecordError) as error:
        RequestRecord.from_json({**REQUEST_JSON, key: value})
    assert f"RequestRecord.{key}: " in str(error.value)
    assert reason in str(error.value)


@pytest.mark.parametrize("value", [None, [], 3, "text"])
def test_a_record_must_be_an_object(value: Any) -> None:
    with pytest.raises(RecordError, match="RequestRecord: expected an object"):
        RequestRecord.from_json(value)


def test_a_nested_record_is_as_strict() -> None:
    value = PLANNED.to_json()
    value["prompt"]["colour"] = "red"
    with pytest.raises(RecordError, match="PromptRecipe: unknown key 'colour'"):
        PlannedRequest.from_json(value)


def test_an_integer_is_good_enough_for_a_float() -> None:
    sample = MetricSample.from_json(
        {
            "t_ns": 1,
            "mark": "m",
            "source": "s",
            "name": "n",
            "value": 3,
            "labels": {},
            "error": None,
        }
    )
    assert sample.value == 3.0
    assert isinstance(sample.value, float)


def test_absent_is_not_zero() -> None:
    absent = MetricSample(1, "m", "s", "n", None)
    assert MetricSample.from_json(absent.to_json()) != dataclasses.replace(absent, value=0.0)


def test_canonical_json_is_one_spelling_per_value() -> None:
    assert canonical_json({"b": [1, 2.5], "a": "ü"}) == '{"a":"\\u00fc","b":[1,2.5]}'
    assert canonical_json({"a": (Outcome.OK, None)}) == '{"a":["ok",null]}'


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_json_are_never_written(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"value": value})


@pytest.mark.parametrize("text", ['{"a": NaN}', "[Infinity]", "[-Infinity]"])
def test_numbers_that_are_not_json_are_never_read(text: str) -> None:
    json.loads(text)  # the standard library would take them
    with pytest.raises(ValueError, match="is not JSON"):
        parse_json(text)


def test_a_key_may_not_appear_twice() -> None:
    with pytest.raises(ValueError, match="key 'a' appears twice"):
        parse_json('{"a": 1, "b": 2, "a": 3}')


def test_digest_does_not_depend_on_key_order() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    # sha256 of {"a":1}, from `printf '{"a":1}' | sha256sum`
    assert digest({"a": 1}) == "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"


def test_ttft_counts_from_sending() -> None:
    assert REQUEST.ttft_s == 0.5
    assert dataclasses.replace(REQUEST, first_token_ns=None).ttft_s is None
    assert dataclasses.replace(REQUEST, sent_ns=None).ttft_s is None


def test_a_trial_is_named_by_what_it_is() -> None:
    facts = TrialFacts(7, "g3", "tiered_disk", "cold_recovery", 4, 1)
    assert facts.id == "07-tiered_disk-cold_recovery-c4-r1"
    assert dataclasses.replace(facts, attempt=2).id == "07-tiered_disk-cold_recovery-c4-r1-a2"


def test_users_of_a_schedule_are_counted_once() -> None:
    again = dataclasses.replace(PLANNED, seq=2)
    other = dataclasses.replace(PLANNED, seq=3, user=9)
    assert Schedule("w", "p", (PLANNED, again, other)).users == 2
