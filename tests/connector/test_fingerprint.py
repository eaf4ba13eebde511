"""The namespace changes with all that can change KV, and with nothing of the ignored list."""

from __future__ import annotations

import decimal
import enum
import functools
import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from harness.connector import fingerprint as fingerprint_module
from harness.connector.blockfile import BlockHeader, write_block
from harness.connector.file_store import FileStore
from harness.connector.fingerprint import FingerprintError, fingerprint, weights_digest
from harness.connector.ignored import IGNORED, IGNORED_VARIABLES, counted_variables, is_ignored
from harness.connector.keys import block_path, chain_keys, namespace_of
from harness.connector.quota import DirectoryQuota

from .configurations import SECTIONS, Fields, FullAttentionSpec, HfConfig, configuration

REPOSITORY = Path(__file__).resolve().parents[2]
TENSORS = {"first": b"a" * 50_000, "middle": b"b" * 50_000, "last": b"c" * 50_000}


def _write_model(directory: Path, tensors: dict[str, bytes]) -> Path:
    directory.mkdir(exist_ok=True)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, content in tensors.items():
        header[name] = {
            "dtype": "BF16", "shape": [len(content) // 2],
            "data_offsets": [offset, offset + len(content)],
        }  # fmt: skip
        offset += len(content)
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + b"".join(tensors.values())
    )
    (directory / "config.json").write_text("{}")
    (directory / "modeling_own.py").write_text("FACTOR = 1.0\n")
    return directory


def _facts(model: Path, config: Any = None, **changes: Any) -> dict[str, Any]:
    facts = fingerprint(
        vllm_config=config or configuration(),
        spec=FullAttentionSpec(
            block_size=changes.get("block_size", 16),
            num_kv_heads=1,
            head_size=8,
            sliding_window=changes.get("sliding_window"),
        ),
        layers=[{"name": changes.get("layer", "l0")}],
        versions=changes.get("versions", {"vllm": "1"}),
        platform={"amx": changes.get("amx", False)},
        model=model,
        code=changes.get("code", ()),
        environment=changes.get("environment", {}),
    )
    assert json.loads(json.dumps(facts)) == facts
    return facts


def _of(model: Path, config: Any = None, **changes: Any) -> str:
    return namespace_of(_facts(model, config, **changes))


@pytest.fixture(scope="module")
def shared_model() -> Iterator[Path]:
    """One model for the property tests, which do not change it."""
    with tempfile.TemporaryDirectory() as directory:
        yield _write_model(Path(directory) / "model", TENSORS)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return _write_model(tmp_path / "model", TENSORS)


# --- public reports ---------------------------------------------------------


def test_longrope_keys_follow_the_effective_context_length(model: Path) -> None:
    """vLLM picks long or short factors by max_model_len when it builds the layer."""
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.0],
        "long_factor": [4.0, 8.0],
        "original_max_position_embeddings": 4096,
    }

    def of(length: int) -> str:
        return _of(
            model,
            configuration(
                model_config__hf_config__rope_parameters=rope, model_config__max_model_len=length
            ),
        )

    assert of(4096) == of(4096)
    assert of(4096) != of(131072)


def test_another_configuration_file_is_another_namespace(model: Path) -> None:
    """``--hf-config-path``: the weights' own config.json stays as it is."""

    def of(factor: float) -> str:
        config = configuration(
            model_config__hf_config_path=f"/configs/{factor}",
            model_config__hf_config__rope_parameters={"rope_type": "linear", "factor": factor},
        )
        return _of(model, config)

    assert of(1.0) == of(1.0)
    assert of(1.0) != of(2.0)


@pytest.mark.parametrize("name", ["modeling_own.py", "configuration_own.py", "parts/rope.py"])
def test_changed_code_beside_the_weights_is_another_namespace(model: Path, name: str) -> None:
    before = _of(model)
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text("FACTOR = 2.0\n")
    assert _of(model) != before


def test_changed_code_from_elsewhere_is_another_namespace(model: Path) -> None:
    """``--code-revision``, or a class registered from outside vLLM: its module's digest."""
    assert _of(model, code=[("m", "a")]) != _of(model, code=[("m", "b")])
    assert _of(model, code=[("m", "a"), ("n", "b")]) == _of(model, code=[("n", "b"), ("m", "a")])


def test_a_directory_of_version_1_is_a_miss(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What kvgate wrote before the whole configuration counted is not found, and stays in place."""
    first_version = {
        "versions": {"vllm": "0.32.0", "format": "2", "checksum": "crc32"},
        "platform": {"device": "cpu"},
        "weights": weights_digest(model),
        "load_format": "auto",
        "model_seed": None,
        "quantization": "None",
        "model_dtype": "torch.bfloat16",
        "cache_dtype": "auto",
        "hf_overrides": {},
        "max_model_len": None,
        "block_tokens": 16,
        "kv_heads": 1,
        "head_size": 8,
        "tensor_parallel_size": 1,
        "layers": [{"name": "l0"}],
    }
    root, tokens, payload_bytes = tmp_path / "tier", list(range(16)), 100

    def store(namespace: str) -> FileStore:
        quota = DirectoryQuota(root, capacity_bytes=None, reserve_bytes=0)
        found = FileStore(root, namespace, payload_bytes, quota=quota)
        found.of_rank(0).open({"namespace": namespace})
        return found

    old = namespace_of(first_version)
    store(old)
    (key,) = chain_keys(old, tokens, 16)
    path = block_path(root, old, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_block(path, BlockHeader(old, key, 0, 0), bytes(payload_bytes))
    assert path.is_file()

    new = _of(model)
    store(new)
    assert new != old
    assert not block_path(root, new, chain_keys(new, tokens, 16)[0]).exists()
    assert path.is_file()

    monkeypatch.setattr(fingerprint_module, "NAMESPACE_VERSION", 3)
    assert _of(model) not in (new, old)


# --- single keys ------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"model_config__hf_overrides": {"x": 1}},
        {"model_config__hf_config__sliding_window": 128},
        {"model_config__hf_config__quantization_config": {"bits": 4}},
        {"model_config__quantization": "fp8"},
        {"model_config__dtype": "float16"},
        {"model_config__seed": 1},  # dummy weights, stochastic rounding
        {"model_config__max_model_len": 200},
        {"model_config__enforce_eager": False},
        {"model_config__multimodal_config": {"mm_encoder_attn_backend": "x"}},
        {"model_config__pooler_config": {"pooling_type": "LAST"}},
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__calculate_kv_scales": True},
        {"cache_config__sliding_window": 128},
        {"parallel_config__tensor_parallel_size": 2},
        {"parallel_config__pipeline_parallel_size": 2},
        {"parallel_config__decode_context_parallel_size": 2},
        {"parallel_config__enable_expert_parallel": True},
        {"load_config__load_format": "dummy"},
        {"compilation_config__mode": 3},
        {"attention_config__backend": "FLASH_ATTN"},
        {"lora_config__max_lora_rank": 32},
        {"lora_config": None},
        {"quant_config": HfConfig(ignored_layers=["lm_head"])},
        {"a_section_of_a_later_vllm": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_changes_kv_changes_the_namespace(model: Path, changes: dict[str, Any]) -> None:
    assert _of(model, configuration(**changes)) != _of(model)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 32},
        {"sliding_window": 128},
        {"layer": "l1"},
        {"versions": {"vllm": "2"}},
        {"amx": True},
        {"environment": {"VLLM_USE_V2_MODEL_RUNNER": "1"}},
        {"environment": {"ONEDNN_MAX_CPU_ISA": "AVX2"}},
    ],
)
def test_so_does_what_lies_outside_the_configuration(model: Path, changes: dict[str, Any]) -> None:
    assert _of(model, **changes) != _of(model)


def test_what_does_not_change_kv_does_not(model: Path) -> None:
    changed = configuration(
        model_config__model="/elsewhere/m",
        model_config__hf_config___name_or_path="/elsewhere/m",
        model_config__tokenizer="other",
        model_config__served_model_name="n",
        cache_config__num_gpu_blocks=7,
        cache_config__gpu_memory_utilization=0.5,
        kv_transfer_config__engine_id="other",
        kv_transfer_config__kv_connector_extra_config={"host_pool_bytes": 2},
        parallel_config__rank=3,
        instance_id="2",
        observability_config=object(),  # nobody looks
    )
    environment = {"VLLM_CPU_KVCACHE_SPACE": "9", "HOME": "/x", "VLLM_API_KEY": "secret"}
    assert _of(model, changed, environment=environment) == _of(model)


def test_secrets_are_not_written_down(model: Path) -> None:
    config = configuration(model_config__hf_token="swordfish")
    text = json.dumps(_facts(model, config, environment={"VLLM_API_KEY": "swordfish"}))
    assert "swordfish" not in text


# --- refused ----------------------------------------------------------------


def test_a_function_as_override_has_no_name(model: Path) -> None:
    with pytest.raises(FingerprintError, match=r"vllm_config\.model_config\.hf_overrides is a "):
        _of(model, configuration(model_config__hf_overrides=lambda config: config))


def test_weights_that_may_be_replaced_have_no_name(model: Path) -> None:
    config = configuration(weight_transfer_config=Fields(backend="nccl"))
    with pytest.raises(FingerprintError, match="weights may be replaced while serving"):
        _of(model, config)


@pytest.mark.parametrize("load_format", ["tensorizer", "ipc_cache", "one_of_a_plugin"])
def test_weights_from_elsewhere_have_no_name(model: Path, load_format: str) -> None:
    with pytest.raises(FingerprintError, match=f"'{load_format}' may read weights from elsewhere"):
        _of(model, configuration(load_config__load_format=load_format))


# --- properties over generated configurations -------------------------------


class Mode(enum.Enum):
    """As vLLM's CompilationMode."""

    NONE = 0
    COMPILE = 3


class Callback:
    """An object that acts; its name would not say how."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None: ...


class Amount(decimal.Decimal):
    """Its number is not among its attributes."""


def _local_object() -> object:
    class Local(Fields): ...

    return Local(x=1)


def _with_itself() -> object:
    items: list[object] = [1]
    items.append(items)
    return items


UNNAMED: list[Callable[[], object]] = [
    lambda: lambda: None,
    lambda: len,
    lambda: functools.partial(int, base=2),
    lambda: object(),
    lambda: threading.Lock(),
    lambda: iter([1]),
    lambda: memoryview(b""),
    lambda: json,
    lambda: ValueError("x"),
    lambda: Callback(),
    lambda: Callback().__call__,
    lambda: Amount(1),
    _local_object,
    _with_itself,
]

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.sampled_from(Mode),
    st.sampled_from([Path("/a"), Path("/b")]),
)
KEYS = st.one_of(st.text(max_size=4), st.sampled_from(["!set", "!pairs", "!object"]))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(st.integers(), inner, max_size=3),
        st.frozensets(st.integers() | st.text(max_size=2), max_size=3),
        st.builds(HfConfig, x=inner),
    ),
    max_leaves=6,
)


def _is_same(one: Any, other: Any) -> bool:
    """Equality that tells 1 from True and 1.0, and a list from what it spells like."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            any(_is_same(k, o) and _is_same(one[k], other[o]) for o in other) for k in one
        )
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, frozenset):
        return sorted(map(repr, one)) == sorted(map(repr, other))
    if isinstance(one, Fields):
        return _is_same(vars(one), vars(other))
    return repr(one) == repr(other)


IGNORED_NAMES = [name for names in IGNORED.values() for name in names]
OWNERS = {kind.__name__: section for section, kind in SECTIONS.items()} | {"VllmConfig": ""}
# Where a value may lie: every field that exists, and names that vLLM does not have yet. Some fields
# are read by name too, and must be what they are.
_READ = {("parallel_config", "tensor_parallel_size"), ("load_config", "load_format")}
COUNTED = [
    (section, field)
    for section, kind in [*SECTIONS.items(), ("model_config__hf_config", HfConfig)]
    for field in [*vars(functools.reduce(getattr, section.split("__"), configuration())), "new"]
    if not is_ignored(kind, field) and (section, field) not in _READ
]
HARMLESS = [
    (OWNERS[owner], field)
    for owner, _, field in (name.partition(".") for name in IGNORED_NAMES)
    if owner in OWNERS
] + [("model_config__hf_config", "_name_or_path"), ("model_config__hf_config", "_commit_hash")]


def _at(section: str, field: str, value: object) -> Any:
    return configuration(**{f"{section}__{field}" if section else field: value})


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(COUNTED), VALUES, VALUES)
@example(("model_config", "max_model_len"), 4096, 131072)
@example(("compilation_config", "mode"), Mode.NONE, 0)
@example(("model_config__hf_config", "new"), {"!set": [1]}, frozenset({1}))
@example(("model_config__hf_config", "new"), {"0": 1}, {0: 1})
@example(("model_config__hf_config", "new"), "/a", Path("/a"))
@example(("model_config__hf_config", "new"), True, 1)
@example(("model_config__hf_config", "new"), float("nan"), "nan")
@example(("model_config__hf_config", "new"), HfConfig(x=1), {"x": 1})
def test_any_change_of_a_counted_key_changes_the_namespace(
    shared_model: Path, place: tuple[str, str], one: Any, other: Any
) -> None:
    assume(not _is_same(one, other))
    assert _of(shared_model, _at(*place, one)) != _of(shared_model, _at(*place, other))


@settings(deadline=None)
@given(st.sampled_from(COUNTED), VALUES)
def test_a_key_that_is_there_is_not_a_key_that_is_absent(
    shared_model: Path, place: tuple[str, str], value: Any
) -> None:
    section, field = place
    assume(field not in ("quantization", "dtype", "cache_dtype", "max_model_len", "hf_text_config"))
    config = _at(*place, value)
    there = _of(shared_model, config)
    delattr(functools.reduce(getattr, section.split("__"), config), field)
    assert _of(shared_model, config) != there


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(HARMLESS), VALUES | st.sampled_from(UNNAMED))
def test_no_change_of_an_ignored_key_changes_it(
    shared_model: Path, place: tuple[str, str], value: Any
) -> None:
    assert _of(shared_model, _at(*place, value)) == _of(shared_model)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(COUNTED), st.sampled_from(UNNAMED), st.integers(0, 2))
def test_what_has_no_stable_name_is_refused_wherever_it_lies(
    shared_model: Path, place: tuple[str, str], make: Callable[[], object], depth: int
) -> None:
    value = make()
    for wrap in (lambda v: [v], lambda v: {"k": v})[:depth]:
        value = wrap(value)
    with pytest.raises(FingerprintError, match=f"no other process could.*{place[1]}"):
        _of(shared_model, _at(*place, value))


_ELSEWHERE = """
import sys
from pathlib import Path
from tests.connector.configurations import HfConfig, configuration
from tests.connector.test_fingerprint import _of
words = {str(n) for n in range(50)}
parts = {word: {"a", "b", word} for word in words}
config = configuration(model_config__hf_config__new=[words, parts, HfConfig(**parts)])
print(_of(Path(sys.argv[1]), config))
"""


def test_equal_configurations_are_equal_in_every_process(model: Path) -> None:
    """Whatever the order of sets, and of attributes made from them."""
    names = {
        subprocess.run(
            [sys.executable, "-c", _ELSEWHERE, str(model)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=REPOSITORY,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(names) == 1
    assert len(names.pop().strip()) == 32


def test_every_ignored_name_is_listed_once_and_can_match() -> None:
    variables = [name for names in IGNORED_VARIABLES.values() for name in names]
    assert len(IGNORED_NAMES) == len(set(IGNORED_NAMES))
    assert len(variables) == len(set(variables))
    assert all(len(name.split(".")) == 2 for name in IGNORED_NAMES)
    assert counted_variables(dict.fromkeys(variables, "1")) == {}
    assert all(len(reason) > 10 for reason in IGNORED)


# --- weights ----------------------------------------------------------------


def test_the_namespace_is_independent_of_place(model: Path, tmp_path: Path) -> None:
    copy = _write_model(tmp_path / "copy", TENSORS)
    assert weights_digest(copy) == weights_digest(model)
    assert _of(copy) == _of(model)


@pytest.mark.parametrize("name", list(TENSORS))
def test_one_changed_tensor_changes_the_digest(model: Path, tmp_path: Path, name: str) -> None:
    other = _write_model(tmp_path / "tuned", {**TENSORS, name: b"x" * 50_000})
    assert weights_digest(other) != weights_digest(model)


def test_a_changed_tokenizer_does_not_and_other_json_does(model: Path) -> None:
    before = _of(model)
    (model / "tokenizer.json").write_text('{"changed": 1}')
    (model / "generation_config.json").write_text('{"temperature": 0}')
    assert _of(model) == before
    (model / "preprocessor_config.json").write_text('{"size": 1}')
    assert _of(model) != before


def test_a_single_file_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"gguf" * 5000)
    before = weights_digest(path)
    assert _facts(path)["model_code"] == ""
    path.write_bytes(b"fugg" * 5000)
    assert weights_digest(path) != before


def test_a_model_without_weights_has_no_name(tmp_path: Path) -> None:
    with pytest.raises(FingerprintError, match="no weight files"):
        weights_digest(tmp_path)
