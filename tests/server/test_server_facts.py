"""What is read back from a server's log and pages; what is not there stays unknown."""

from __future__ import annotations

import json

import pytest

from harness.server.facts import error_lines, from_log, from_metrics

# Lines of vLLM 0.32.0 on the CPU, shortened inside where nothing is read.
ENGINE_LINE = (
    "(EngineCore pid=20462) INFO 11-30 23:54:06 [core.py:133] Initializing a V1 LLM engine "
    "(v0.32.0) with config: model='models/qwen3', speculative_config=None, tokenizer_mode=auto, "
    "trust_remote_code=False, dtype=torch.float32, max_seq_len=4608, load_format=auto, "
    "tensor_parallel_size=1, pipeline_parallel_size=1, quantization=None, enforce_eager=True, "
    "kv_cache_dtype=auto, device_config=cpu, seed=0, served_model_name=kvgate-model, "
    "enable_prefix_caching=True, enable_chunked_prefill=True, pooler_config=None\n"
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

BASE = {
    "dtype": "torch.float32",
    "kv_cache_dtype": "auto",
    "prefix_caching": True,
    "chunked_prefill": True,
    "enforce_eager": True,
    "tensor_parallel": 1,
    "max_model_len": 4608,
    "connector": "none",
}


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        pytest.param("", {}, id="no log, as of a server of somebody else: nothing is known"),
        pytest.param(START, {"connector": "none"}, id="a log without those lines"),
        pytest.param(START + ENGINE_LINE, BASE, id="the engine's configuration"),
        pytest.param(
            ENGINE_LINE.replace("enable_prefix_caching=True", "enable_prefix_caching=False"),
            BASE | {"prefix_caching": False},
            id="prefix caching off",
        ),
        pytest.param(
            ENGINE_LINE.replace("kv_cache_dtype=auto, ", ""),
            {key: value for key, value in BASE.items() if key != "kv_cache_dtype"},
            id="a key that the line lacks is absent",
        ),
        pytest.param(CORES_LINE, {"compute_threads": 2, "connector": "none"}, id="two bound cores"),
        pytest.param(
            CORES_LINE.replace("[0, 1]", "[3]"),
            {"compute_threads": 1, "connector": "none"},
            id="one bound core",
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
    ],
)
def test_the_log_tells_what_it_tells(log: str, expected: dict[str, object]) -> None:
    assert from_log(log) == expected


def test_a_ready_line_that_is_cut_off_tells_nothing() -> None:
    log = READY_LINE.replace('"direct_io": true}', '"direct_io": tr}')
    assert "connector_config" not in from_log(log)


def info(**labels: str) -> str:
    """One engine's line; a label with an empty text is left out."""
    found = {
        "block_size": "128",
        "enable_prefix_caching": "True",
        "engine": "0",
        "num_gpu_blocks": "140",
        **labels,
    }
    shown = ",".join(f'{name}="{text}"' for name, text in found.items() if text)
    return f"vllm:cache_config_info{{{shown}}} 1.0\n"


ONE = {
    "engines": 1,
    "block_tokens": 128,
    "device_blocks": 140,
    "prefix_caching": True,
    "kv_capacity_tokens": 17920,
}


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        pytest.param("", {}, id="no such series"),
        pytest.param(info(), ONE, id="128 x 140 tokens"),
        pytest.param(
            info(num_gpu_blocks="None"),
            {"engines": 1, "block_tokens": 128, "prefix_caching": True},
            id="a capacity that is not known is absent",
        ),
        pytest.param(
            info(kv_cache_size_tokens="5120"),
            ONE | {"kv_capacity_tokens": 5120},
            id="a hybrid model states less than the product",
        ),
        pytest.param(
            info(kv_cache_size_tokens="None"), ONE, id="a size that is not stated is the product"
        ),
        pytest.param(
            info(num_gpu_blocks="", kv_cache_size_tokens="5120"),
            {"engines": 1, "block_tokens": 128, "prefix_caching": True, "kv_capacity_tokens": 5120},
            id="a size without blocks",
        ),
        pytest.param(
            info() + info(engine="1", num_gpu_blocks="90"),
            ONE | {"engines": 2, "device_blocks": 230, "kv_capacity_tokens": 29440},
            id="engines of 140 and 90 blocks",
        ),
        pytest.param(
            info() + info(engine="1"),
            ONE | {"engines": 2, "device_blocks": 280, "kv_capacity_tokens": 35840},
            id="two engines of 140 blocks",
        ),
        pytest.param(
            info(kv_cache_size_tokens="5120") + info(engine="1"),
            ONE | {"engines": 2, "device_blocks": 280, "kv_capacity_tokens": 5120 + 17920},
            id="each engine by what it states itself",
        ),
        pytest.param(
            info() + info(engine="1", num_gpu_blocks="None"),
            {"engines": 2, "block_tokens": 128, "prefix_caching": True},
            id="an engine whose blocks are unknown leaves no sum",
        ),
        pytest.param(
            info() + info(engine="1", block_size="64", enable_prefix_caching="False"),
            {
                "engines": 2,
                "block_tokens": [128, 64],
                "device_blocks": 280,
                "prefix_caching": [True, False],
                "kv_capacity_tokens": 140 * 192,
            },
            id="what engines state differently equals nothing",
        ),
        pytest.param(
            info() + info(num_gpu_blocks="90"),
            {"engines": 1, "block_tokens": 128, "prefix_caching": True},
            id="one engine that contradicts itself",
        ),
        pytest.param(
            info(instance="a:1") + info(instance="b:1"),
            ONE | {"engines": 2, "device_blocks": 280, "kv_capacity_tokens": 35840},
            id="two servers behind one page",
        ),
        pytest.param(
            info(num_gpu_blocks="\u00b2", block_size="True"),
            {"engines": 1, "prefix_caching": True},
            id="digits that are no number end nothing",
        ),
        pytest.param(
            info(cache_dtype="fp8", sliding_window="None", gpu_memory_utilization="0.9"),
            ONE | {"cache.cache_dtype": "fp8", "cache.gpu_memory_utilization": 0.9},
            id="every other label by its name",
        ),
        pytest.param(info().replace(" 1.0", " NaN"), ONE, id="the labels tell, whatever the value"),
    ],
)
def test_the_metrics_page_tells_capacity(page: str, expected: dict[str, object]) -> None:
    assert from_metrics(page) == expected


def test_the_log_in_an_error_message_is_its_errors() -> None:
    log = "\n".join(
        [
            "INFO a",
            "(EngineCore pid=1) ERROR 11-30 [core.py:1] first",
            "INFO b",
            "ValueError: too small",
        ]
    )
    assert error_lines(log).splitlines() == [
        "(EngineCore pid=1) ERROR 11-30 [core.py:1] first",
        "ValueError: too small",
    ]


def test_a_log_without_errors_gives_its_last_lines() -> None:
    log = "\n".join(f"line {i}" for i in range(30))
    assert error_lines(log).splitlines() == [f"line {i}" for i in range(15, 30)]


def test_an_empty_log_says_so() -> None:
    assert error_lines("\n\n") == "(the log is empty)"


def test_a_long_line_is_cut() -> None:
    assert len(error_lines("ERROR " + "x" * 1000)) == 300
