"""Prints the documentation that is made from the code: docs/reasons.md.

    python -m harness.cli.reasons_page > docs/reasons.md

A test fails when the file and this output differ.
"""

from __future__ import annotations

from harness.judge.causes import FOLLOWS, ORDER
from harness.verdicts import REASON_TEXTS, ReasonCode

_HEADINGS = {
    "run": "End of a run",
    "criterion": "Criteria",
    "oracle": "Output oracles",
    "trial": "Validity of a trial",
    "arms": "Comparison of arms",
    "arrival": "Arrival check",
    "evidence": "Evidence",
    "judge": "Judge",
    "gate": "Gates",
}

_OPENING = """\
# Reasons

Every verdict that is not PASS names at least one reason; every failed check of a trial or of a
pair of arms names one too. A reason has a code, a sentence with the value found and the value
allowed, and the path of the evidence inside the run directory.

Made by `python -m harness.cli.reasons_page` from `REASON_TEXTS` in `harness/verdicts.py` and
`FOLLOWS` in `harness/judge/causes.py`; do not edit.
"""

_FOLLOWS = """\
## What follows from what

Screen, page and verdict file (`causes`) show root causes, the one of the verdict first; what merely
follows from a root is folded under it, with all its findings. A reason follows from another when

1. the table below names the two codes,
2. both are about the same trials: a check is about its trial; a criterion about the trials that its
   measure draws on; what ended the run about the trials that were not finished; requests that
   failed while sessions were stored, and a tier that lacks them, also about the later trials of the
   arm; a check of two arms explains the criteria that compare these two,
3. the cause comes first: what ended the run, then what its trials show in the order of the table,
   then a stop-loss, then what was not reached.

A reason that could follow from several follows from the first. Roots are ordered by their gravest
verdict (STOP, INCONCLUSIVE, NOT RUN), then as in the table. `oracle.control_missed` with a control
that was asked and not seen follows only from a server that changed, `trial.not_cold`,
`trial.load_failures`, `trial.no_tier_hits` and `oracle.output_differs`.

What ended the run outside the deployment (`arrival.server_unreachable`, `arrival.port_taken`,
`run.server_unusable`, `run.disk_full`, `run.interrupted`, `run.harness_died`,
`run.harness_failed`) never becomes STOP.

| cause | may explain |
| --- | --- |
"""


def reasons_markdown() -> str:
    """docs/reasons.md: every reason code, what to do about it, and what follows from what."""
    lines = [_OPENING]
    for area, heading in _HEADINGS.items():
        lines += [
            f"## {heading}",
            "",
            "| code | what it says | what to do |",
            "| --- | --- | --- |",
        ]
        for code in ReasonCode:
            if code.value.partition(".")[0] == area:
                text = REASON_TEXTS[code]
                lines.append(f"| `{code.value}` | {text.meaning} | {text.remedy} |")
        lines.append("")
    lines.append(_FOLLOWS.rstrip("\n"))
    for cause in ORDER:
        if effects := FOLLOWS.get(cause):
            codes = ", ".join(f"`{code.value}`" for code in ORDER if code in effects)
            lines.append(f"| `{cause.value}` | {codes} |")
    lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(reasons_markdown(), end="")
