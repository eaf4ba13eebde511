"""The shell against the vLLM that is installed: signatures, roles, and one block through all hooks.

Skipped where vLLM is absent. No server: configuration objects are stand-ins.
"""

from __future__ import annotations

import inspect
import logging
import pickle
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorRole,
)

from harness.connector.config import ConfigError  # noqa: E402
from harness.connector.connector import KvgateTierConnector  # noqa: E402

from .configurations import KVTransferConfig, configuration  # noqa: E402

BLOCKS, HEADS, TOKENS, HEAD_SIZE = 8, 2, 16, 32
LAYERS = ["l0", "l1"]


class FullAttentionSpec:
    """Stands in for vLLM's; the connector looks at the name."""

    block_size = TOKENS
    num_kv_heads = HEADS
    head_size = HEAD_SIZE
    sliding_window = None


def _cache_config(*specs: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=s, layer_names=LAYERS) for s in specs]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=BLOCKS, kv_cache_layout="x")


def _vllm_config(model: Path, extra: dict[str, Any], policy: str = "recompute", **top: Any) -> Any:
    transfer = KVTransferConfig(
        kv_connector_extra_config=extra, kv_load_failure_policy=policy, is_kv_producer=True
    )
    return configuration(
        kv_transfer_config=transfer,
        model_config__model=str(model),
        **top.get("changes", {}),
    )


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("harness.connector.device._attention_backends", lambda *_: ["stand-in"])
    monkeypatch.setattr("harness.connector.connector.code_in_use", lambda _: [])
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.bin").write_bytes(b"weights")
    return directory


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="vllm.kvgate")
    # vLLM's own handler may end the propagation to the root logger, where caplog listens.
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return caplog


def _pair(config: Any, cache: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Worker side and scheduler side of one server, introduced to each other."""
    worker = KvgateTierConnector(config, KVConnectorRole.WORKER, kv_cache_config=cache)
    tensors = {
        name: torch.zeros((BLOCKS, HEADS, TOKENS, 2 * HEAD_SIZE), dtype=torch.bfloat16)
        for name in LAYERS
    }
    worker.register_kv_caches(tensors)
    scheduler = KvgateTierConnector(config, KVConnectorRole.SCHEDULER, kv_cache_config=cache)
    handshake = pickle.loads(pickle.dumps(worker.get_handshake_metadata()))
    scheduler.set_xfer_handshake_metadata({0: handshake})
    return worker, scheduler, tensors


def _request(name: str) -> Any:
    tokens = list(range(TOKENS + 3))
    return SimpleNamespace(
        request_id=name, all_token_ids=tokens, num_tokens=len(tokens), lora_request=None,
        mm_features=[], cache_salt=None, prompt_embeds=None, skip_reading_prefix_cache=False,
    )  # fmt: skip


def _step(worker: Any, scheduler: Any, *, new: list[Any], tokens: int) -> set[str]:
    output = SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set()
        ),
        num_scheduled_tokens={r.req_id: tokens for r in new},
        total_num_scheduled_tokens=tokens * len(new),
    )
    metadata = pickle.loads(pickle.dumps(scheduler.build_connector_meta(output)))
    worker.bind_connector_metadata(metadata)
    worker.start_load_kv(None)
    worker.wait_for_save()
    _, received = worker.get_finished(set())
    assert worker.get_block_ids_with_load_errors() == set()
    statistics = worker.get_kv_connector_stats()
    report = pickle.loads(pickle.dumps(worker.build_connector_worker_meta()))
    worker.clear_connector_metadata()
    scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=report))
    merged = statistics.aggregate(scheduler.get_kv_connector_stats())
    assert not KvgateTierConnector.build_kv_connector_stats(merged.data).is_empty()
    return received or set()


def test_no_abstract_method_is_left() -> None:
    assert not KvgateTierConnector.__abstractmethods__


def test_hooks_take_what_the_installed_base_class_passes() -> None:
    for name, ours in vars(KvgateTierConnector).items():
        base = getattr(KVConnectorBase_V1, name, None)
        if name.startswith("_") or not inspect.isfunction(ours) or base is None:
            continue
        wanted = inspect.signature(base).parameters
        assert list(inspect.signature(ours).parameters) == list(wanted), name


def test_one_block_goes_out_and_comes_back(
    model: Path, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    extra = {"host_pool_bytes": 1 << 20, "directory": str(tmp_path / "tier")}
    worker, scheduler, tensors = _pair(
        _vllm_config(model, extra), _cache_config(FullAttentionSpec())
    )
    assert "kvgate tier ready: {" in log.text
    for tensor in tensors.values():
        tensor[3] = torch.randn_like(tensor[3])
    first = _request("a")
    assert scheduler.get_num_new_matched_tokens(first, 0) == (0, False)
    new = SimpleNamespace(req_id="a", num_computed_tokens=0, block_ids=([3, 4],))
    _step(worker, scheduler, new=[new], tokens=first.num_tokens)
    assert scheduler.request_finished(first, [3, 4]) == (False, None)

    second = _request("b")
    assert scheduler.get_num_new_matched_tokens(second, 0) == (TOKENS, True)
    blocks = SimpleNamespace(get_block_ids=lambda: ([6],))
    scheduler.update_state_after_alloc(second, blocks, TOKENS)
    sources = scheduler.get_external_cache_hit_sources(second, TOKENS)
    assert sum(sources.values()) in (0, TOKENS)
    assert _step(worker, scheduler, new=[], tokens=0) == {"b"}
    for tensor in tensors.values():
        assert torch.equal(tensor[6], tensor[3])
        assert not tensor[5].any()
    worker.shutdown()


def test_unusable_settings_stop_the_start(model: Path) -> None:
    for role in KVConnectorRole:
        with pytest.raises(ConfigError, match="host_pool_bytes is required"):
            KvgateTierConnector(
                _vllm_config(model, {"x": 1}),
                role,
                kv_cache_config=_cache_config(FullAttentionSpec()),
            )


@pytest.mark.parametrize(
    ("specs", "stages", "reason"),
    [
        ((FullAttentionSpec(), FullAttentionSpec()), 1, "2 KV cache groups"),
        ((), 1, "0 KV cache groups"),
        ((SimpleNamespace(block_size=1),), 1, "only full attention"),
        ((FullAttentionSpec(),), 2, "pipeline_parallel_size is 2"),
    ],
)
def test_unsupported_models_are_served_without_the_tier(
    model: Path, log: pytest.LogCaptureFixture, specs: tuple[Any, ...], stages: int, reason: str
) -> None:
    changes = {"parallel_config__pipeline_parallel_size": stages}
    config = _vllm_config(model, {"host_pool_bytes": 1 << 20}, changes=changes)
    _, scheduler, _ = _pair(config, _cache_config(*specs))
    assert log.text.count("event=tier_off") == 1
    assert reason in log.text
    assert scheduler.get_num_new_matched_tokens(_request("a"), 0) == (0, False)
    assert scheduler.reset_cache() is True


def test_a_pool_too_small_for_a_block_is_served_without_the_tier(
    model: Path, log: pytest.LogCaptureFixture
) -> None:
    config = _vllm_config(model, {"host_pool_bytes": 5000})
    _, scheduler, _ = _pair(config, _cache_config(FullAttentionSpec()))
    assert "host_pool_bytes is 5000" in log.text
    assert scheduler.get_num_new_matched_tokens(_request("a"), 0) == (0, False)


def test_wrong_failure_policy_disables_loads_and_says_so(
    model: Path, log: pytest.LogCaptureFixture
) -> None:
    config = _vllm_config(model, {"host_pool_bytes": 1 << 20}, policy="fail")
    worker, scheduler, _ = _pair(config, _cache_config(FullAttentionSpec()))
    assert "event=loads_disabled" in log.text
    first = _request("a")
    scheduler.get_num_new_matched_tokens(first, 0)
    new = SimpleNamespace(req_id="a", num_computed_tokens=0, block_ids=([3, 4],))
    _step(worker, scheduler, new=[new], tokens=first.num_tokens)
    assert scheduler.get_num_new_matched_tokens(_request("b"), 0) == (0, False)


def test_hooks_do_not_raise(model: Path, log: pytest.LogCaptureFixture) -> None:
    config = _vllm_config(model, {"host_pool_bytes": 1 << 20})
    worker, scheduler, _ = _pair(config, _cache_config(FullAttentionSpec()))
    worker._worker = scheduler._scheduler = object()
    worker.bind_connector_metadata(scheduler.build_connector_meta(None))
    worker.start_load_kv(None)
    worker.wait_for_save()
    assert worker.get_finished(set()) == (None, None)
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.get_kv_connector_stats() is None
    assert worker.build_connector_worker_meta() is None
    assert scheduler.get_num_new_matched_tokens(_request("a"), 0) == (0, False)
    assert scheduler.request_finished(_request("a"), []) == (False, None)
    assert scheduler.reset_cache() is False
    assert "event=hook_failed" in log.text


def test_delivery_is_not_required(model: Path) -> None:
    config = _vllm_config(model, {"host_pool_bytes": 1 << 20})
    cache = _cache_config(FullAttentionSpec())
    connector = KvgateTierConnector(config, KVConnectorRole.SCHEDULER, kv_cache_config=cache)
    assert connector.requires_kv_delivery is False


def test_what_cannot_be_named_keeps_no_files_and_says_why(
    model: Path, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    extra = {"host_pool_bytes": 1 << 20, "directory": str(tmp_path / "tier")}
    changes = {"model_config__hf_overrides": lambda config: config}
    config = _vllm_config(model, extra, changes=changes)
    _, scheduler, _ = _pair(config, _cache_config(FullAttentionSpec()))
    assert "event=disk_tier_off" in log.text
    assert "vllm_config.model_config.hf_overrides is a builtins.function" in log.text
    assert "kvgate tier ready: {" in log.text  # host memory serves
    assert not (tmp_path / "tier").exists()
    assert scheduler.get_num_new_matched_tokens(_request("a"), 0) == (0, False)


def test_code_in_use_is_read_from_where_it_was_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's class from outside vLLM, a worker's, and a model's own code without its place."""
    from harness.connector import engine_view
    from harness.connector.fingerprint import FingerprintError

    def module(name: str, text: str) -> Any:
        path = tmp_path / f"{name.rpartition('.')[2]}.py"
        path.write_text(text)
        made = types.ModuleType(name)
        made.__file__ = str(path)
        exec(text, made.__dict__)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    own = module("own_model", "class Model: pass\n")
    remote = module("transformers_modules.m_1.4f2a.modeling_m", "x = 1\n")
    module("own_worker", "class Extension: pass\n")
    monkeypatch.setattr(
        "vllm.model_executor.model_loader.utils.get_model_architecture",
        lambda _: (own.Model, "Model"),
    )
    config = configuration(parallel_config__worker_extension_cls="own_worker.Extension")
    monkeypatch.setattr(engine_view, "_NAMED_BY_VERSION", engine_view._NAMED_BY_VERSION | {"tests"})
    before = engine_view.code_in_use(config)
    assert [name for name, _ in before] == ["modeling_m", "own_model", "own_worker"]

    Path(remote.__file__).write_text("x = 2\n")
    after = engine_view.code_in_use(config)
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, True, True]

    Path(own.__file__).unlink()
    with pytest.raises(FingerprintError, match="source of module own_model"):
        engine_view.code_in_use(config)
