"""How a server is asked over HTTP: address, base path, key, TLS. The key leaves in a header only.

One request, one connection: nothing kept alive between measurements and none repeated.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from harness.errors import ServerError


@dataclass(frozen=True)
class Access:
    """Address and credentials of a server. ``base_url`` may carry a base path, with or without /v1.

    ``secret`` is never part of the representation, an argument or a file.
    """

    base_url: str
    secret: str | None = field(default=None, repr=False)
    verify_tls: bool = True

    @property
    def root_url(self) -> str:
        """The address below which /health, /metrics and /v1 lie."""
        return self.base_url.rstrip("/").removesuffix("/v1").rstrip("/")

    def get(self, path: str, *, timeout_s: float) -> httpx.Response:
        """One GET. Raises httpx.HTTPError."""
        return self._send("GET", path, timeout_s)

    def post(self, path: str, *, timeout_s: float, **content: Any) -> httpx.Response:
        """One POST. Raises httpx.HTTPError."""
        return self._send("POST", path, timeout_s, **content)

    def served_models(self, *, timeout_s: float) -> list[str]:
        """Names of the models that /v1/models lists. Raises httpx.HTTPError, or ServerError when
        the page is no list of models.
        """
        answer = self.get("/v1/models", timeout_s=timeout_s).raise_for_status()
        try:
            return [str(model["id"]) for model in answer.json()["data"]]
        except (ValueError, TypeError, LookupError) as error:
            found = self.redacted(answer.text[:80])
            raise ServerError(
                f"{self.root_url}/v1/models: found {found!r}; allowed: a list of models as "
                "OpenAI's API defines it"
            ) from error

    def redacted(self, text: str) -> str:
        """The text without the key: a server may echo what it was sent."""
        return text.replace(self.secret, "***") if self.secret else text

    def _send(self, method: str, path: str, timeout_s: float, **content: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.secret}"} if self.secret else {}
        # Loading the system's certificates takes tens of milliseconds; plain HTTP needs none.
        verify = self.verify_tls and self.base_url.startswith("https:")
        url = f"{self.root_url}{path}"
        with httpx.Client(timeout=timeout_s, verify=verify, trust_env=False) as client:
            return client.request(method, url, headers=headers, **content)


def read_secret(api_key_env: str | None, api_key_file: str | None) -> str | None:
    """The API key from a variable or a file; None when neither is named. Raises ServerError."""
    if api_key_env is not None:
        source, secret = f"api_key_env: variable {api_key_env}", os.environ.get(api_key_env, "")
    elif api_key_file is not None:
        source = f"api_key_file: {api_key_file}"
        path = Path(os.path.expandvars(api_key_file)).expanduser()
        try:
            secret = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ServerError(f"{source}: cannot be read: {error}") from error
    else:
        return None
    secret = secret.strip()
    if not secret or not secret.isascii() or not secret.isprintable():
        found = "nothing" if not secret else "characters that no header can carry"
        raise ServerError(f"{source}: found {found}; allowed: the API key in printable ASCII")
    return secret
