"""A server that somebody else runs: never started, stopped, reset or looked into, only asked.

Whatever fails here is `Unreachable`: from outside nobody can tell the server from the way to it.
"""

from __future__ import annotations

import difflib
from typing import Self

import httpx

from harness.errors import ServerError, Unreachable
from harness.records import ServerFacts
from harness.server.access import Access
from harness.server.facts import effective_configuration
from harness.server.managed import ANSWER_DEADLINE_S


class ExternalServer:
    """A server somebody else runs: it is never started, stopped, reset or looked into by us."""

    owned = False

    def __init__(
        self,
        arm: str,
        base_url: str,
        model: str,
        *,
        secret: str | None = None,
        verify_tls: bool = True,
        answer_deadline_s: float = ANSWER_DEADLINE_S,
    ) -> None:
        self.arm, self.model = arm, model
        self.access = Access(base_url, secret, verify_tls)
        self.base_url = self.access.root_url
        self._answer_deadline_s = answer_deadline_s

    def __enter__(self) -> Self:
        self.check_usable()
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def facts(self) -> ServerFacts:
        """What the server says of itself over HTTP. Raises Unreachable."""
        try:
            effective, versions = effective_configuration(
                self.access, "", timeout_s=self._answer_deadline_s
            )
        except ServerError as error:
            raise Unreachable(f"arm {self.arm}: {error}") from error
        return ServerFacts(
            arm=self.arm,
            kind="url",
            argv=(),
            environment={},
            effective=effective,
            versions=versions,
        )

    def pids(self) -> list[int]:
        """Unknown: the processes are not ours."""
        return []

    def log_text(self, start: int = 0) -> str:
        """Unknown."""
        return ""

    def log_size(self) -> int:
        """Unknown."""
        return 0

    def check_alive(self) -> None:
        """Raises Unreachable when the server does not answer."""
        self.check_answers()

    def check_answers(self) -> None:
        """Raises Unreachable when the server is silent, fails or refuses the key."""
        self._get("/v1/models")

    def check_usable(self) -> None:
        """Asks /health, TLS, key and model name before anything is measured. Raises Unreachable."""
        self._get("/health")  # a gateway may know no such page; what it knows must not fail
        status = self._get("/v1/models")
        if status != 200:
            raise Unreachable(
                f"arm {self.arm}: {self.base_url}/v1/models answered {status}; needed: 200 and a "
                "list of models; check the arm's url"
            )
        try:
            served = self.access.served_models(timeout_s=self._answer_deadline_s)
        except (httpx.HTTPError, ServerError) as error:
            raise Unreachable(f"arm {self.arm}: {self.access.redacted(str(error))}") from error
        if self.model not in served:
            near = difflib.get_close_matches(self.model, served, n=1)
            names = self.access.redacted(", ".join(served[:20])) or "none"
            hint = f"; did you mean {near[0]}?" if near else ""
            raise Unreachable(
                f"arm {self.arm}: {self.base_url} serves no model {self.model}; allowed, by its "
                f"/v1/models: {names}{hint}; set served_model of the arm"
            )

    def _get(self, page: str) -> int:
        """The status of a page that neither failed nor was refused us. Raises Unreachable."""
        try:
            status = self.access.get(page, timeout_s=self._answer_deadline_s).status_code
        except httpx.HTTPError as error:
            text = self.access.redacted(str(error))
            remedy = "check the arm's url"
            if "CERTIFICATE_VERIFY_FAILED" in text:
                remedy = "install the certificate's issuer, or set verify_tls = false"
            raise Unreachable(
                f"arm {self.arm}: {self.base_url} does not answer: {type(error).__name__}: "
                f"{text}; {remedy}"
            ) from error
        if status in (401, 403):
            raise Unreachable(
                f"arm {self.arm}: {self.base_url} refuses us with status {status}; check "
                "api_key_env or api_key_file of the arm"
            )
        if status >= 500:
            raise Unreachable(f"arm {self.arm}: {self.base_url}{page} answered {status}")
        return status
