"""The server over real HTTP, in its own process: endpoints, dialects, chat, truth."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.campaign.arms import LaunchSpec
from harness.campaign.generated_model import ModelArchitecture, model_config
from harness.collectors.process import read_processes, with_simulated_reads
from harness.collectors.prometheus import METRICS, gauge_value, samples_from_page
from harness.load.completion import CompletionStream
from harness.load.sse import SseParser
from harness.records import RecordError
from harness.server.managed import ManagedServer
from harness.sim.config import parse_config
from harness.sim.truth import read_truth

ARCHITECTURE = ModelArchitecture(
    hidden_size=64,
    num_layers=2,
    num_attention_heads=2,
    num_kv_heads=1,
    head_size=32,
    dtype="float32",
)
PROMPT = list(range(40))


@contextmanager
def running(tmp_path: Path, **config: Any) -> Iterator[ManagedServer]:
    """A simulated server under the harness's own supervision."""
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(model_config(ARCHITECTURE)))
    content = {"medium": "disk", "truth_path": str(tmp_path / "truth.jsonl"), **config}
    argv = ("-m", "harness.sim", "--config", json.dumps(content), "--model", str(model))
    spec = LaunchSpec("sim", (sys.executable, *argv), dict(os.environ), 30.0, kind="sim")
    with ManagedServer(spec, log_path=tmp_path / "server.log") as server:
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagedServer]:
    """One server for the tests that change nothing in it."""
    with running(tmp_path_factory.mktemp("sim")) as found:
        yield found


def complete(server: ManagedServer, **body: Any) -> CompletionStream:
    """A streamed answer as the load client's parser reads it."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    content = {"max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}, **body}
    parser, stream = SseParser(), CompletionStream()
    url = f"{server.base_url}{path}"
    with httpx.stream("POST", url, json=content, trust_env=False, timeout=20.0) as response:
        for number, chunk in enumerate(response.iter_bytes()):
            for event in parser.feed(chunk):
                stream.fold(number, event)
    stream.end(parser.close())
    return stream


def test_what_it_says_of_itself_is_read_back(server: ManagedServer) -> None:
    facts = server.facts()
    assert facts.kind == "sim"
    assert facts.versions == {"vllm": "0.32.0"}
    assert facts.effective["block_tokens"] == 16
    assert facts.effective["kv_capacity_tokens"] == 16384
    assert facts.effective["connector"] == "kvgate"
    # 2 x 2 layers x 1 head x 32 x 4 bytes.
    assert facts.effective["connector_config"]["kv_bytes_per_token"] == 512
    assert facts.effective["connector_config"]["simulated"] is True
    assert facts.effective["compute_threads"] == 1
    assert server.log_text().startswith("SIMULATED")


def test_a_completion_streams_tokens_with_ids_logprobs_and_usage(server: ManagedServer) -> None:
    stream = complete(server, prompt=PROMPT, logprobs=0, return_token_ids=True)
    assert len(stream.token_ids) == len(stream.logprobs) == 4
    assert (stream.prompt_tokens, stream.completion_tokens) == (40, 4)
    assert (stream.finish_reason, stream.is_done) == ("length", True)


def test_a_completion_that_is_not_streamed_is_the_same_answer(server: ManagedServer) -> None:
    # The first asks for a prompt of its own, the second is a device hit of the first.
    prompt = [7, *PROMPT]
    complete(server, prompt=prompt)
    streamed = complete(server, prompt=prompt, return_token_ids=True)
    body = {"prompt": prompt, "max_tokens": 4, "return_token_ids": True}
    url = f"{server.base_url}/v1/completions"
    answer = httpx.post(url, json=body, trust_env=False, timeout=20.0).json()
    assert answer["choices"][0]["token_ids"] == streamed.token_ids
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}


def test_a_chat_begins_with_its_role_which_is_no_token(server: ManagedServer) -> None:
    stream = complete(server, messages=[{"role": "user", "content": "hello, world, how are you"}])
    assert stream.token_counts == [1, 1, 1, 1]
    assert stream.first_event_ns is not None
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    url = f"{server.base_url}/v1/chat/completions"
    answer = httpx.post(url, json=body, trust_env=False, timeout=20.0).json()
    assert answer["choices"][0]["message"]["content"].startswith(" ŧ")


def test_text_is_tokenized_to_its_bytes(server: ManagedServer) -> None:
    url = f"{server.base_url}/tokenize"
    answer = httpx.post(url, json={"prompt": "aé"}, trust_env=False, timeout=20.0).json()
    assert answer["tokens"] == [97, 195, 169]
    assert answer["count"] == 3


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        pytest.param("/v1/completions", {"prompt": ["x"]}, 400, id="not token ids"),
        pytest.param("/v1/completions", {"prompt": [1] * 20000}, 400, id="too long"),
        pytest.param("/v1/completions", {}, 400, id="no prompt"),
        pytest.param("/sim/plant", {"control": "x", "prompt": [], "donor": []}, 400, id="control"),
        pytest.param("/nowhere", {}, 404, id="no such page"),
    ],
)
def test_a_bad_request_gets_an_error_and_the_server_goes_on(
    server: ManagedServer, path: str, body: dict[str, Any], status: int
) -> None:
    url = f"{server.base_url}{path}"
    assert httpx.post(url, json=body, trust_env=False, timeout=20.0).status_code == status
    server.check_answers()


@pytest.mark.parametrize(
    ("dialect", "absent"),
    [("0.32.0", set()), ("0.20.1", {"prompt_tokens_by_source", "cached_tokens_by_source"})],
)
def test_each_dialect_has_the_series_of_its_version(
    tmp_path: Path, dialect: str, absent: set[str]
) -> None:
    with running(tmp_path, dialect=dialect) as server:
        page = httpx.get(f"{server.base_url}/metrics", trust_env=False).text
    samples = samples_from_page(page, mark="m", t_ns=1)
    assert {s.name for s in samples if s.value is None} == absent
    assert {s.name for s in samples} == {metric.name for metric in METRICS}


def test_engines_share_the_blocks_and_count_their_own_requests(tmp_path: Path) -> None:
    with running(tmp_path, time_scale=10.0, engines=3) as server:
        for _ in range(4):
            complete(server, prompt=PROMPT)
        facts = server.facts()
        page = httpx.get(f"{server.base_url}/metrics", trust_env=False).text
    assert facts.effective["engines"] == 3
    assert facts.effective["kv_capacity_tokens"] == 16384
    samples = samples_from_page(page, mark="m", t_ns=1)
    counted = {s.labels["engine"]: s.value for s in samples if s.name == "prompt_tokens"}
    # Requests 0 and 3 are engine 0's.
    assert counted == {"0": 80.0, "1": 40.0, "2": 40.0}
    assert gauge_value(samples, "tier_disk_enabled") == (1.0, None)


def test_the_medium_of_a_simulation_is_its_own_witness(tmp_path: Path) -> None:
    with running(tmp_path, time_scale=10.0) as server:
        complete(server, prompt=PROMPT)
        reset = f"{server.base_url}/reset_prefix_cache?reset_external=true"
        complete(server, prompt=[1])
        assert httpx.post(reset, trust_env=False).json() == {"success": True}
        complete(server, prompt=PROMPT)
        page = httpx.get(f"{server.base_url}/metrics", trust_env=False).text
        samples = with_simulated_reads(read_processes(server.pids(), mark="m"), page)
    reads = [s.value for s in samples if s.name == "disk_read_bytes"]
    # Two whole blocks of 16 tokens, 512 bytes each; the engine's process reads nothing.
    assert reads == [2 * 16 * 512, 0.0]


def test_the_truth_of_each_request_is_written_down(tmp_path: Path) -> None:
    with running(tmp_path, time_scale=10.0) as server:
        complete(server, prompt=[1, 2, 3])  # shorter than a block: no number
        first = complete(server, prompt=PROMPT, return_token_ids=True)
        complete(server, prompt=PROMPT)
        # Truth is written once the answer has left; then the server answers again.
        server.check_answers()
    with (tmp_path / "truth.jsonl").open(encoding="ascii") as lines:
        cold, warm = read_truth(lines)
    assert (cold.number, warm.number) == (0, 1)
    assert list(cold.token_ids) == first.token_ids
    assert cold.tokens_by_source == {"computed": 40, "device": 0, "host": 0, "disk": 0}
    assert warm.tokens_by_source == {"computed": 8, "device": 32, "host": 0, "disk": 0}
    assert cold.first_token_ns is not None
    # 40 tokens at 2500 per simulated second, ten of which pass in one.
    assert cold.first_token_ns - cold.received_ns >= 1_600_000


def test_a_request_spends_its_time_in_front_of_the_engine(tmp_path: Path) -> None:
    with running(tmp_path, time_scale=2.0, front_s=0.2, front_sigma=0.0) as server:
        complete(server, prompt=PROMPT)
        # Truth is written once the answer has left; then the server answers again.
        server.check_answers()
    with (tmp_path / "truth.jsonl").open(encoding="ascii") as lines:
        (truth,) = read_truth(lines)
    assert truth.first_token_ns is not None
    assert truth.first_token_ns - truth.received_ns >= 100_000_000


def test_a_time_below_zero_is_refused() -> None:
    with pytest.raises(RecordError, match=r"front_s: found -1\.0; allowed: 0 or above"):
        parse_config({"front_s": -1.0})


def test_a_page_without_the_witness_gives_no_reads_rather_than_none_read() -> None:
    samples = with_simulated_reads(read_processes([os.getpid()], mark="m"), "")
    reads = [s for s in samples if s.name == "disk_read_bytes"]
    assert [s.value for s in reads] == [None]
    assert reads[0].error is not None
