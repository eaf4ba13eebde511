"""Every key that a start-up log states, and nothing that it does not state."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.judge.validity import differing_keys, is_declared
from harness.judge.validity.pairs import MAY_DIFFER, SAME_AS
from harness.records import ServerFacts, canonical_json
from harness.server.start_log import from_log

HEAD = (
    "(EngineCore pid=20462) INFO 11-30 23:54:06 [core.py:133] Initializing a V1 LLM engine "
    "(v0.32.0) with config: "
)
# As vLLM 0.32.0 writes it on the CPU, with fewer keys of each kind.
CONFIGURATION = (
    "model='models/qwen3', speculative_config=None, tokenizer_mode=auto, trust_remote_code=False, "
    "dtype=torch.float32, max_seq_len=4608, tensor_parallel_size=1, pipeline_parallel_size=1, "
    "data_parallel_size=1, quantization=None, enforce_eager=True, "
    "aux_output_config=AuxOutputConfig(enable_return_routed_experts=False, max_bytes=None), "
    "kv_cache_dtype=auto, device_config=cpu, "
    "structured_outputs_config=StructuredOutputsConfig(backend='auto', reasoning_parser=''), "
    "seed=0, served_model_name=kvgate-model, enable_prefix_caching=True, "
    "enable_chunked_prefill=True, pooler_config=None, compilation_config={'mode': "
    "<CompilationMode.NONE: 0>, 'custom_ops': ['all'], 'inductor_compile_config': {'a, b': "
    "False}, 'dynamic_shapes_config': {'type': <DynamicShapesType.BACKED: 'backed'>}, "
    "'compile_ranges_endpoints': [2048, 4096], 'hook': <function f at 0x7f00aa11>}, "
    "kernel_config=KernelConfig(ir_op_priority=IrOpPriorityConfig(rms_norm=['native']), "
    "moe_backend='auto')"
)
ENGINE_LINE = HEAD + CONFIGURATION + "\n"
# What differs in the line of 0.20.1, by its source.
OLDER_LINE = ENGINE_LINE.replace("v0.32.0", "v0.20.1").replace(
    "aux_output_config=AuxOutputConfig(enable_return_routed_experts=False, max_bytes=None)",
    "enable_return_routed_experts=False",
)
ARGUMENTS = {"port": 4711, "model": "models/qwen3", "max_model_len": 4608}
ARGUMENT_LINE = (
    f"(APIServer pid=20330) INFO 11-30 23:53:50 [api_utils.py:286] non-default args: {ARGUMENTS}\n"
)
KV_TRANSFER = (
    ", 'kv_transfer_config': KVTransferConfig(kv_connector='KvgateTierConnector', "
    "engine_id='77f2', kv_connector_extra_config={'directory': '/tier'}, kv_port=14579)}"
)
CORES_LINE = (
    "(EngineCore pid=20462) INFO 11-30 23:54:06 [ompmultiprocessing.py:185] "
    "\tlocal_rank=0, core ids=[0, 1]\n"
)
CREATING_LINE = (
    "(EngineCore pid=20462) INFO 11-30 23:54:25 [factory.py:62] Creating v1 connector with "
    "name: {name} and engine_id: be2a5b47-606b-408a-aef3-be9158905e01\n"
)
TIER = {"host_pool_bytes": 167772160, "kv_bytes_per_token": 8192, "direct_io": True}
READY_LINE = (
    "(EngineCore pid=20462) INFO 11-30 23:54:25 [connector.py:502] kvgate tier ready: "
    + json.dumps(TIER)
    + "\n"
)
START = "(APIServer pid=20330) INFO 11-30 23:53:50 [api_server.py:1] vLLM API server\n"

STATED: dict[str, Any] = {
    "model": "models/qwen3",
    "speculative_config": None,
    "tokenizer_mode": "auto",
    "trust_remote_code": False,
    "dtype": "torch.float32",
    "max_model_len": 4608,
    "tensor_parallel": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "quantization": None,
    "enforce_eager": True,
    "aux_output_config": "AuxOutputConfig",
    "aux_output_config.enable_return_routed_experts": False,
    "aux_output_config.max_bytes": None,
    "kv_cache_dtype": "auto",
    "device_config": "cpu",
    "structured_outputs_config": "StructuredOutputsConfig",
    "structured_outputs_config.backend": "auto",
    "structured_outputs_config.reasoning_parser": "",
    "seed": 0,
    "served_model_name": "kvgate-model",
    "prefix_caching": True,
    "chunked_prefill": True,
    "pooler_config": None,
    "compilation_config": "{...}",
    "compilation_config.mode": "CompilationMode.NONE",
    "compilation_config.custom_ops": "['all']",
    "compilation_config.inductor_compile_config": "{...}",
    "compilation_config.inductor_compile_config.a, b": False,
    "compilation_config.dynamic_shapes_config": "{...}",
    "compilation_config.dynamic_shapes_config.type": "DynamicShapesType.BACKED",
    "compilation_config.compile_ranges_endpoints": "[2048, 4096]",
    "compilation_config.hook": "<function f>",
    "kernel_config": "KernelConfig",
    "kernel_config.ir_op_priority": "IrOpPriorityConfig",
    "kernel_config.ir_op_priority.rms_norm": "['native']",
    "kernel_config.moe_backend": "auto",
}
ASKED = {"args.port": 4711, "args.model": "models/qwen3", "args.max_model_len": 4608}


def test_every_key_of_the_line_is_read() -> None:
    assert from_log(ENGINE_LINE) == STATED


def test_the_line_of_an_older_version_is_read() -> None:
    gone = {"aux_output_config", "aux_output_config.max_bytes"}
    gone |= {"aux_output_config.enable_return_routed_experts"}
    expected = {key: value for key, value in STATED.items() if key not in gone}
    assert from_log(OLDER_LINE) == expected | {"enable_return_routed_experts": False}


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        pytest.param("", {}, id="no log, as of a server of somebody else: nothing is known"),
        pytest.param(START, {}, id="a log without those lines"),
        pytest.param(ARGUMENT_LINE, ASKED, id="arguments alone do not tell that there is none"),
        pytest.param(
            ARGUMENT_LINE + ENGINE_LINE, STATED | ASKED | {"connector": "none"}, id="no connector"
        ),
        pytest.param(
            ARGUMENT_LINE[:-10] + "\n" + ENGINE_LINE,
            STATED | {"args.port": 4711, "args.model": "models/qwen3"},
            id="arguments that were cut off may have named one",
        ),
        pytest.param(
            ENGINE_LINE + CORES_LINE, STATED | {"compute_threads": 2}, id="a log cut at its start"
        ),
        pytest.param(CORES_LINE.replace("[0, 1]", "[3]"), {"compute_threads": 1}, id="one core"),
        pytest.param(
            CORES_LINE + CORES_LINE.replace("[0, 1]", "[3]"),
            {"compute_threads": [2, 1]},
            id="ranks with different threads",
        ),
        pytest.param(
            CREATING_LINE.format(name="KvgateTierConnector") + READY_LINE,
            {"connector": "kvgate", "connector_config": TIER},
            id="the bundled connector reports itself",
        ),
        pytest.param(
            CREATING_LINE.format(name="OffloadingConnector"),
            {"connector": "OffloadingConnector"},
            id="another connector is known by its name",
        ),
        pytest.param(
            CREATING_LINE.format(name="KvgateTierConnector"),
            {"connector": "KvgateTierConnector"},
            id="ours, but it never became ready",
        ),
        pytest.param(
            READY_LINE.replace('"direct_io": true}', '"direct_io": tr}'),
            {"connector": "kvgate"},
            id="a ready line that another process wrote into",
        ),
        pytest.param(
            READY_LINE.replace("8192", "NaN"), {"connector": "kvgate"}, id="NaN is no JSON"
        ),
        pytest.param(
            "max_num_batched_tokens=2048.\n", {"batched_tokens": 2048}, id="a line of its own"
        ),
    ],
)
def test_the_log_tells_what_it_tells(log: str, expected: dict[str, object]) -> None:
    assert from_log(log) == expected


def test_a_connector_that_was_asked_for_and_is_not_in_the_log_is_not_none() -> None:
    asked = ARGUMENT_LINE.rstrip()[:-1] + KV_TRANSFER + "\n"
    found = from_log(asked + ENGINE_LINE)
    assert "connector" not in found
    assert found["args.kv_transfer_config.kv_connector_extra_config.directory"] == "/tier"
    offloading = ARGUMENT_LINE.rstrip()[:-1] + ", 'kv_offloading_size': 4.0}\n"
    assert "connector" not in from_log(offloading + ENGINE_LINE)


def test_secrets_are_not_kept() -> None:
    line = ARGUMENT_LINE.rstrip()[:-1] + ", 'api_key': ['sk-1234'], 'hf_token': 'hf_1'}\n"
    found = from_log(line)
    assert (found["args.api_key"], found["args.hf_token"]) == ("***", "***")
    assert "1234" not in canonical_json(found)


def test_engines_that_state_different_things_equal_nothing() -> None:
    other = ENGINE_LINE.replace("max_seq_len=4608", "max_seq_len=2048")
    assert from_log(ENGINE_LINE + other)["max_model_len"] == [4608, 2048]
    assert from_log(ENGINE_LINE + ENGINE_LINE) == STATED


@given(st.integers(0, len(ENGINE_LINE) - 2))
def test_a_line_that_was_cut_states_only_keys_that_are_whole(length: int) -> None:
    assert from_log(ENGINE_LINE[:length]) == {}
    found = from_log(ENGINE_LINE[:length] + "\n")
    # Of the last value nobody can tell whether it is whole.
    last = next(reversed(found), "").split(".")[0]
    for key, value in found.items():
        assert key.split(".")[0] == last or STATED[key] == value


@given(st.text(max_size=200))
def test_any_text_after_the_words_ends_no_run(text: str) -> None:
    found = from_log(HEAD + text + "\n" + "non-default args: " + text)
    canonical_json(found)


# --- every stated key that differs is reported ---------------------------------

words = st.text(alphabet="abcdefghijklmnop_", min_size=3, max_size=12).filter(str.isidentifier)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.text(alphabet="abc ,=()[]{}'\"\\:<>", max_size=10),
)
values = st.recursive(
    scalars, lambda inner: st.dictionaries(words, inner, min_size=1, max_size=3), max_leaves=6
)


def representation(value: Any, *, as_object: bool) -> str:
    """As a dataclass writes itself, or as the dictionary that it is."""
    if isinstance(value, dict) and as_object:
        parts = (f"{k}={representation(v, as_object=as_object)}" for k, v in value.items())
        return f"Config({', '.join(parts)})"
    if isinstance(value, dict):
        parts = (f"{k!r}: {representation(v, as_object=as_object)}" for k, v in value.items())
        return "{" + ", ".join(parts) + "}"
    return repr(value)


def line_of(configuration: dict[str, Any], *, as_object: bool) -> str:
    parts = (f"{k}={representation(v, as_object=as_object)}" for k, v in configuration.items())
    return HEAD + ", ".join(parts) + "\n"


def facts(arm: str, effective: dict[str, Any]) -> ServerFacts:
    return ServerFacts(arm, "vllm", (), {}, effective)


def flat(configuration: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by flat key."""
    found: dict[str, Any] = {}
    for key, value in configuration.items():
        found |= (
            flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return found


@given(st.dictionaries(words, values, min_size=1, max_size=6), scalars, st.booleans(), st.data())
def test_any_stated_key_that_differs_is_reported(
    configuration: dict[str, Any], other: Any, as_object: bool, data: st.DataObject
) -> None:
    leaves = flat(configuration)
    key = data.draw(st.sampled_from(sorted(leaves)))
    changed = json.loads(json.dumps(configuration))
    holder, *path = [changed, *key.split(".")]
    for name in path[:-1]:
        holder = holder[name]
    holder[path[-1]] = other
    one, two = (from_log(line_of(c, as_object=as_object)) for c in (configuration, changed))
    found = differing_keys(facts("a", one), facts("b", two))
    if canonical_json(leaves[key]) == canonical_json(other):
        assert found == []
    else:
        assert key in found
        assert not is_declared(key, ["another"])
        assert is_declared(key, [key.split(".", maxsplit=1)[0]])


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (("data_parallel_size=1", "data_parallel_size=2"), "data_parallel_size"),
        (("pipeline_parallel_size=1", "pipeline_parallel_size=2"), "pipeline_parallel_size"),
        (
            (
                "speculative_config=None",
                "speculative_config=SpeculativeConfig(method='ngram', num_spec_tokens=3)",
            ),
            "speculative_config.method",
        ),
        (("quantization=None", "quantization=fp8"), "quantization"),
        (("model='models/qwen3'", "model='models/qwen3-other'"), "model"),
        (("CompilationMode.NONE: 0", "CompilationMode.VLLM_COMPILE: 3"), "compilation_config.mode"),
        (("seed=0", "seed=1"), "seed"),
        (("moe_backend='auto'", "moe_backend='triton'"), "kernel_config.moe_backend"),
        (("[2048, 4096]", "[2048]"), "compilation_config.compile_ranges_endpoints"),
        (("pooler_config=None", "pooler_config=None, brand_new=7"), "brand_new"),
        (("trust_remote_code=False", "trust_remote_code=0"), "trust_remote_code"),
    ],
)
def test_a_change_of_one_arm_is_named(change: tuple[str, str], key: str) -> None:
    one, other = from_log(ENGINE_LINE), from_log(ENGINE_LINE.replace(*change))
    assert key in differing_keys(facts("a", one), facts("b", other))


def test_what_may_differ_and_what_an_argument_came_to_is_not_reported() -> None:
    one = from_log(ARGUMENT_LINE + ENGINE_LINE)
    asked = (
        ARGUMENT_LINE.replace("4711", "4712").rstrip()[:-1]
        + ", 'dtype': 'float32'"
        + KV_TRANSFER
        + "\n"
    )
    other = from_log(asked + ENGINE_LINE.replace("0x7f00aa11", "0x7f00bb22"))
    assert differing_keys(facts("a", one), facts("b", other)) == ["connector"]


def test_a_part_of_an_argument_that_no_other_line_states_is_reported() -> None:
    line = (
        ARGUMENT_LINE.rstrip()[:-1] + ", 'speculative_config': {'method': 'ngram', 'lookup': %d}}\n"
    )
    engine = ENGINE_LINE.replace(
        "speculative_config=None", "speculative_config=SpeculativeConfig(method='ngram')"
    )
    one, other = (from_log(line % lookup + engine) for lookup in (2, 3))
    assert differing_keys(facts("a", one), facts("b", other)) == ["args.speculative_config.lookup"]
    assert is_declared("args.speculative_config.lookup", ["speculative_config"])


def test_every_exception_has_its_reason() -> None:
    assert all(MAY_DIFFER.values())
    assert not set(SAME_AS) & set(MAY_DIFFER)
