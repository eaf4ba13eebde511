"""Prints the documentation that is made from the code: docs/reasons.md.

    python -m harness.cli.reasons_page > docs/reasons.md

A test fails when the file and this output differ.
"""

from __future__ import annotations

from harness.verdicts import REASON_TEXTS, ReasonCode

_HEADINGS = {
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

Made by `python -m harness.cli.reasons_page` from `REASON_TEXTS` in `harness/verdicts.py`; do not
edit.
"""


def reasons_markdown() -> str:
    """docs/reasons.md: every reason code with its meaning and what to do."""
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
    return "\n".join(lines)


if __name__ == "__main__":
    print(reasons_markdown(), end="")
