"""What is read back from a server's log and pages; what is not there stays unknown."""

from __future__ import annotations

import pytest

from harness.server.facts import error_lines, from_metrics


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
