"""The sign-off page: one HTML file that needs nothing else, made from one verdict file.

Same input, same bytes: no clock, no randomness, no environment. Needs no network, script or font to
be read; a content policy inside the page forbids them, because its texts come from the system under
test.
"""

from __future__ import annotations

from collections.abc import Mapping

from jinja2 import Environment, PackageLoader, StrictUndefined

from harness.verdicts import SignOff
from reports.assemble import build_page
from reports.safe import evidence_href
from reports.texts import load


def render_html(signoff: SignOff, provenance: Mapping[str, str], locale: str = "en") -> str:
    """The whole page in ``locale`` ("en" or "zh").

    ``provenance`` is shown at the end and read by nothing else. Names with a text of their own:
    run, started, ended, harness, python, system, processor, cores, memory, host, campaign_digest;
    others are shown as they are. Pure. Raises MissingText for an unknown or incomplete locale.
    """
    texts = load(locale)
    page = build_page(signoff, provenance, texts)
    return _environment().get_template("signoff.html.j2").render(page=page, t=texts)


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["evidence_href"] = evidence_href
    return environment
