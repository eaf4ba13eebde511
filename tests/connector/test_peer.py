"""The peer's copies without vLLM, and its arm in a campaign. In vLLM: tests/live/test_peer.py."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest

from harness.campaign import arms
from harness.campaign.generated_model import model_config
from harness.campaign.plan import make_plan
from harness.campaign.reading import load_campaign
from harness.campaign.sections import Arm
from harness.connector.layout import CacheTensor, LayoutError
from harness.connector.peer_copy import RowCopies
from tests.campaign_text import SMALL_CAMPAIGN

ROOT = Path(__file__).resolve().parents[2]
BLOCKS, LAYERS, PAGE_BYTES, ROW_BYTES, ROWS = 5, 3, 64, 256, 4
PADDING = 0xEE


def _cache() -> tuple[np.ndarray, list[CacheTensor]]:
    """Layers one after the other in one allocation, as vLLM 0.32 hands them over."""
    storage = np.random.RandomState(1).randint(0, 256, LAYERS * BLOCKS * PAGE_BYTES, np.uint8)
    return storage, [
        CacheTensor(
            name=str(layer),
            storage=storage,
            offset_bytes=layer * BLOCKS * PAGE_BYTES,
            shape=(BLOCKS, PAGE_BYTES),
            strides=(PAGE_BYTES, 1),
            item_bytes=1,
            dtype="int8",
        )
        for layer in range(LAYERS)
    ]


def _rows(row_bytes: int = ROW_BYTES) -> np.ndarray:
    return np.full((ROWS, row_bytes), PADDING, np.uint8)


def _block(storage: np.ndarray, block_id: int) -> bytes:
    """A block's pages in layer order: the order in which vLLM's own worker fills a row."""
    pages = storage.reshape(LAYERS, BLOCKS, PAGE_BYTES)[:, block_id]
    return pages.tobytes()


def test_a_row_is_the_pages_of_a_block_in_the_order_of_the_tensors() -> None:
    storage, tensors = _cache()
    rows = _rows()
    copies = RowCopies(tensors, BLOCKS, rows)
    assert copies.store([4, 0], [1, 3]) == 2 * LAYERS * PAGE_BYTES
    assert rows[1, : LAYERS * PAGE_BYTES].tobytes() == _block(storage, 4)
    assert rows[3, : LAYERS * PAGE_BYTES].tobytes() == _block(storage, 0)
    assert (rows[[0, 2]] == PADDING).all()
    assert (rows[:, LAYERS * PAGE_BYTES :] == PADDING).all()


def test_a_load_brings_back_what_was_stored_and_touches_no_other_block() -> None:
    storage, tensors = _cache()
    copies = RowCopies(tensors, BLOCKS, _rows())
    before = [_block(storage, block_id) for block_id in range(BLOCKS)]
    copies.store([0, 1], [2, 0])
    assert copies.load([0, 2], [3, 4]) == 2 * LAYERS * PAGE_BYTES
    after = [_block(storage, block_id) for block_id in range(BLOCKS)]
    assert after == [*before[:3], before[1], before[0]]


def test_rows_too_short_for_a_block_are_refused() -> None:
    _storage, tensors = _cache()
    with pytest.raises(LayoutError, match="a row of the host tier has 191 bytes, a block 192"):
        RowCopies(tensors, BLOCKS, _rows(191))


@pytest.mark.parametrize(
    ("blocks", "rows"), [([-1], [0]), ([BLOCKS], [0]), ([0], [-1]), ([0], [ROWS])]
)
def test_ids_outside_are_refused(blocks: list[int], rows: list[int]) -> None:
    _storage, tensors = _cache()
    copies = RowCopies(tensors, BLOCKS, _rows())
    with pytest.raises(IndexError):
        copies.store(blocks, rows)
    with pytest.raises(IndexError):
        copies.load(rows, blocks)


def test_unequal_lists_are_refused() -> None:
    _storage, tensors = _cache()
    with pytest.raises(ValueError, match="shorter"):
        RowCopies(tensors, BLOCKS, _rows()).store([0, 1], [0])


def _documented_arm() -> str:
    """The arm's tables as docs/peer.md shows them."""
    text = (ROOT / "docs" / "peer.md").read_text(encoding="utf-8")
    block = text.split("## As an arm of a campaign\n\n", 1)[1].split("\nThe harness", 1)[0]
    return textwrap.dedent(block)


@pytest.fixture
def peer_arm(tmp_path: Path) -> Arm:
    path = tmp_path / "campaign.toml"
    path.write_text(SMALL_CAMPAIGN + "\n" + _documented_arm(), encoding="utf-8")
    campaign, text = load_campaign(path)
    plan = make_plan(campaign, text, model_config=model_config(campaign.model.generated))
    assert {trial.arm for trial in plan.trials()} >= {"peer", "tiered_disk"}
    return campaign.arms["peer"]


def test_a_campaign_takes_the_documented_arm(peer_arm: Arm, tmp_path: Path) -> None:
    campaign, _text = load_campaign(tmp_path / "campaign.toml")
    spec = arms.launch_spec(
        campaign,
        peer_arm,
        home=tmp_path,
        model_dir=tmp_path / "model",
        tier_dir=tmp_path / "tier",
        import_path=tmp_path / "import",
        allowed_cores=[0, 1],
        inherited={},
    )
    config = spec.argv[spec.argv.index("--kv-transfer-config") + 1]
    assert f'"root_dir": "{tmp_path / "tier"}"' in config
    assert '"spec_module_path": "harness.connector.peer"' in config
    assert (ROOT / "harness" / "connector" / "peer.py").is_file()
