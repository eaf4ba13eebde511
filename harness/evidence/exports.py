"""Writes what a run holds in the formats of other tools. Derived files: nothing reads them back.

`vllm-bench`: one file per arm and level, shaped like the result of `vllm bench serve` with details.
`csv`: one row per request. `junit`: one case per criterion. Judges nothing: the last one is handed
a sign-off.
"""

from __future__ import annotations

import csv
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import EvidenceError, PlanError
from harness.evidence.results import read_provenance
from harness.evidence.store import RunEvidence, open_run, write_atomic
from harness.records import Outcome, RequestRecord
from harness.verdicts import CriterionResult, GateVerdict, Reason, SignOff, Verdict

FORMATS = ("vllm-bench", "csv", "junit")
_WAVE = "wave"


def export_requests(run_path: Path, kind: str, out: Path | None = None) -> list[Path]:
    """Writes the files of `vllm-bench` or `csv`; returns them. Raises EvidenceError, PlanError."""
    folder = _folder(run_path, out)
    run = open_run(run_path)
    if not any(trial.requests for trial in run.trials):
        raise EvidenceError(f"{run_path}: holds no request; a published table cannot be exported")
    if kind == "csv":
        return [_save(folder / "requests.csv", requests_csv(run))]
    started = read_provenance(run_path).get("started", "")
    return [
        _save(folder / kind / f"{name}.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
        for name, content in vllm_bench(run, started)
    ]


def export_junit(run_path: Path, signoff: SignOff, out: Path | None = None) -> list[Path]:
    """Writes `junit.xml`; returns its path in a list. Raises PlanError."""
    return [_save(_folder(run_path, out) / "junit.xml", junit_xml(signoff))]


def _folder(run_path: Path, out: Path | None) -> Path:
    """Where to write; inside a run only `report/` may grow after sealing."""
    if out is None:
        return run_path / "report"
    inside = out.resolve()
    root = run_path.resolve()
    if inside.is_relative_to(root) and not inside.is_relative_to(root / "report"):
        raise PlanError(
            [f"--out: found {out}, inside the sealed run; allowed: {run_path}/report, or elsewhere"]
        )
    return out


def _save(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)
    return path


# --- vllm bench serve ---------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    """One request in the terms of `vllm bench serve`: seconds; failed ones are zero and empty."""

    ok: bool
    start_s: float
    input_tokens: int
    output_tokens: int
    ttft_s: float
    latency_s: float
    itl_s: tuple[float, ...]
    error: str


def vllm_bench(run: RunEvidence, started: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, content) per arm and level, over the waves of all repetitions.

    Keys and units are those of vLLM 0.32: lists in seconds, summaries in milliseconds, percentiles
    linear as numpy's, means over completed requests only. `duration` is the sum of the waves' own.
    A summary of no completed request is null, where vLLM writes 0. Texts were never recorded.
    """
    cells: dict[tuple[str, int], list[list[RequestRecord]]] = {}
    for trial in run.trials:
        if trial.facts.workload == "cold_recovery":
            wave = [record for record in trial.requests if record.phase == _WAVE]
            cell = cells.setdefault((trial.facts.arm, trial.facts.concurrency), [])
            if wave:
                cell.append(wave)
    stamp = re.sub(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d).*", r"\1\2\3-\4\5\6", started)
    for (arm, level), waves in cells.items():
        if waves:
            yield (
                f"{arm}-c{level}",
                {
                    "date": stamp,
                    "endpoint_type": "openai",
                    "backend": "openai",
                    "label": arm,
                    "model_id": None,
                    "tokenizer_id": None,
                    "num_prompts": sum(len(wave) for wave in waves),
                    "request_rate": "inf",
                    "burstiness": 1.0,
                    "max_concurrency": level,
                    **_result(waves),
                    "kvgate_waves": len(waves),
                },
            )


def _result(waves: Sequence[Sequence[RequestRecord]]) -> dict[str, Any]:
    origin = min(r.sent_ns or r.planned_ns for wave in waves for r in wave)
    by_wave = [[_seen(record, origin) for record in wave] for wave in waves]
    every = [seen for wave in by_wave for seen in wave]
    done = [seen for seen in every if seen.ok]
    duration = sum(_duration(wave) for wave in waves)
    tokens_in = sum(seen.input_tokens for seen in done)
    tokens_out = sum(seen.output_tokens for seen in done)
    busiest = [_busiest([seen for seen in wave if seen.ok]) for wave in by_wave]

    def rate(amount: int) -> float | None:
        return amount / duration if duration > 0 else None

    return {
        "duration": duration,
        "completed": len(done),
        "failed": len(every) - len(done),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": rate(len(done)),
        "request_goodput": None,
        "output_throughput": rate(tokens_out),
        "total_token_throughput": rate(tokens_in + tokens_out),
        "input_lens": [seen.input_tokens for seen in every],
        "output_lens": [seen.output_tokens for seen in every],
        "ttfts": [seen.ttft_s for seen in every],
        "itls": [list(seen.itl_s) for seen in every],
        "latencies": [seen.latency_s for seen in every],
        "start_times": [seen.start_s for seen in every],
        "generated_texts": ["" for _ in every],
        "errors": [seen.error for seen in every],
        "max_output_tokens_per_s": max(tokens for tokens, _ in busiest),
        "max_concurrent_requests": max(requests for _, requests in busiest),
        **_summary("ttft", [seen.ttft_s for seen in done]),
        **_summary(
            "tpot",
            [
                (seen.latency_s - seen.ttft_s) / (seen.output_tokens - 1)
                for seen in done
                if seen.output_tokens > 1
            ],
        ),
        **_summary("itl", [gap for seen in done for gap in seen.itl_s]),
        **_summary("e2el", [seen.latency_s for seen in done]),
    }


def _seen(record: RequestRecord, origin_ns: int) -> _Seen:
    sent = record.planned_ns if record.sent_ns is None else record.sent_ns
    first, last = record.first_token_ns, record.last_token_ns
    start = (sent - origin_ns) / 1e9
    if record.outcome is not Outcome.OK or first is None or last is None:
        kind = record.error_kind.value if record.error_kind else record.outcome.value
        text = f"{kind}: {record.error_detail}" if record.error_detail else kind
        return _Seen(False, start, record.prompt_tokens_planned, 0, 0.0, 0.0, (), text)
    return _Seen(
        ok=True,
        start_s=start,
        input_tokens=record.prompt_tokens or record.prompt_tokens_planned,
        output_tokens=record.completion_tokens or 0,
        ttft_s=(first - sent) / 1e9,
        latency_s=(last - sent) / 1e9,
        itl_s=tuple((after - before) / 1e9 for before, after in pairwise(record.token_ns)),
        error="",
    )


def _duration(wave: Iterable[RequestRecord]) -> float:
    records = list(wave)
    sent = [r.sent_ns for r in records if r.sent_ns is not None]
    done = [r.done_ns for r in records if r.done_ns is not None]
    return max(0.0, (max(done) - min(sent)) / 1e9) if sent and done else 0.0


def _busiest(done: Sequence[_Seen]) -> tuple[float, int]:
    """Most chunks and most requests in one whole second since the wave's first start."""
    if not done:
        return 0.0, 0
    origin = min(seen.start_s for seen in done)
    chunks: dict[int, int] = {}
    active: dict[int, int] = {}
    for seen in done:
        at = seen.start_s - origin + seen.ttft_s
        for gap in (0.0, *seen.itl_s):
            at += gap
            chunks[int(at)] = chunks.get(int(at), 0) + 1
        ends = int(seen.start_s - origin + seen.latency_s)
        for second in range(int(seen.start_s - origin), ends + 1):
            active[second] = active.get(second, 0) + 1
    return float(max(chunks.values())), max(active.values())


def _summary(name: str, values_s: Sequence[float]) -> dict[str, float | None]:
    keys = (f"mean_{name}_ms", f"median_{name}_ms", f"std_{name}_ms", f"p99_{name}_ms")
    if not values_s:
        return dict.fromkeys(keys)
    values = np.asarray(values_s, dtype=float) * 1000
    found = (values.mean(), np.median(values), values.std(), np.percentile(values, 99))
    return dict(zip(keys, map(float, found), strict=True))


# --- CSV ------------------------------------------------------------------------

_COLUMNS = (
    "trial",
    "arm",
    "workload",
    "level",
    "repetition",
    "phase",
    "seq",
    "user",
    "session",
    "outcome",
    "error_kind",
    "sent_ns",
    "ttft_s",
    "e2e_s",
    "tpot_s",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
)


def requests_csv(run: RunEvidence) -> str:
    """One row per request of every trial. An empty cell: no such value, never zero.

    Holds numbers and our own words only: what a server answered could be a formula to whoever opens
    the file in a spreadsheet.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for trial in run.trials:
        facts = trial.facts
        for r in trial.requests:
            writer.writerow(
                (
                    facts.id,
                    facts.arm,
                    facts.workload,
                    facts.concurrency,
                    facts.repetition,
                    r.phase,
                    r.seq,
                    r.user,
                    r.session,
                    r.outcome.value,
                    r.error_kind.value if r.error_kind else None,
                    r.sent_ns,
                    r.ttft_s,
                    _seconds(r.sent_ns, r.last_token_ns),
                    _tpot_s(r),
                    r.prompt_tokens,
                    r.completion_tokens,
                    r.cached_tokens,
                )
            )
    return text.getvalue()


def _seconds(start_ns: int | None, end_ns: int | None) -> float | None:
    return None if start_ns is None or end_ns is None else (end_ns - start_ns) / 1e9


def _tpot_s(record: RequestRecord) -> float | None:
    span = _seconds(record.first_token_ns, record.last_token_ns)
    count = record.completion_tokens
    return None if span is None or count is None or count < 2 else span / (count - 1)


# --- JUnit ----------------------------------------------------------------------

# What XML 1.0 cannot hold, escaped or not.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(signoff: SignOff) -> str:
    """One suite per gate, one case per criterion and one for the gate; only PASS is no failure."""
    root = ElementTree.Element("testsuites", name="kvgate")
    for gate in signoff.gates:
        suite = ElementTree.SubElement(root, "testsuite", name=_xml(gate.gate))
        properties = ElementTree.SubElement(suite, "properties")
        for name, value in (
            ("campaign", signoff.campaign),
            ("profile", signoff.profile),
            ("label", signoff.label),
            ("signable", str(signoff.signable).lower()),
            ("judge_version", signoff.judge_version),
            ("evidence_digest", signoff.evidence_digest or "absent"),
            ("criteria_digest", signoff.criteria_digest or "absent"),
        ):
            ElementTree.SubElement(properties, "property", name=name, value=_xml(value))
        for result in gate.criteria:
            _criterion_case(suite, gate.gate, result)
        _gate_case(suite, gate)
        cases = suite.findall("testcase")
        suite.set("tests", str(len(cases)))
        suite.set("failures", str(sum(case.find("failure") is not None for case in cases)))
        suite.set("errors", "0")
        suite.set("skipped", "0")
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _criterion_case(suite: ElementTree.Element, gate: str, result: CriterionResult) -> None:
    measurement = result.measurement
    bound = str(result.bound)
    value = "absent" if measurement.value is None else str(measurement.value)
    _case(
        suite,
        gate,
        result.id,
        result.verdict,
        result.reasons,
        (
            ("verdict", result.verdict.value),
            ("value", value),
            ("unit", measurement.unit.value),
            ("n", str(measurement.n)),
            ("bound", bound),
            *([("missed", ", ".join(map(str, result.missed)))] if result.missed else []),
            *([] if result.baseline is None else [("baseline", result.baseline)]),
        ),
        f"{result.verdict.value}: value {value}, bound {bound}",
    )


def _gate_case(suite: ElementTree.Element, gate: GateVerdict) -> None:
    facts = (("verdict", gate.verdict.value),)
    message = f"{gate.gate}: {gate.verdict.value}"
    _case(suite, gate.gate, "gate", gate.verdict, gate.reasons, facts, message)


def _case(
    suite: ElementTree.Element,
    gate: str,
    name: str,
    verdict: Verdict,
    reasons: Sequence[Reason],
    facts: Sequence[tuple[str, str]],
    message: str,
) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname=_xml(f"kvgate.{gate}"))
    case.set("name", _xml(name))
    properties = ElementTree.SubElement(case, "properties")
    for key, value in facts:
        ElementTree.SubElement(properties, "property", name=key, value=_xml(value))
    if verdict is not Verdict.PASS:
        failure = ElementTree.SubElement(case, "failure", type=verdict.value, message=_xml(message))
        failure.text = _xml("\n".join(f"{r.code.value}: {r.text}" for r in reasons))


def _xml(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)
