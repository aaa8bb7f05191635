"""Quantized communication: vectors and gradients travel in the types that TorchRec's codecs ask for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from faces.dynamicemb import jobs, ranks
from faces.dynamicemb.models import all_rows
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.types import CommOp, NoOpQuantizedCommCodec, QuantizedCommCodecs

from dynamicemb.wire import Wire, wire_of

OPERATION = CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL


def registry(**config: Any) -> dict[str, Any]:
    return {OPERATION.name: get_qcomm_codecs(QCommsConfig(**config))}


def test_the_types_are_those_of_the_codecs() -> None:
    both = registry(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
    assert wire_of(both, OPERATION) == Wire(torch.float16, torch.bfloat16)
    assert wire_of(both, CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL) == wire_of(None, OPERATION) == Wire()
    assert wire_of({OPERATION.name: QuantizedCommCodecs(NoOpQuantizedCommCodec())}, OPERATION) == Wire()


def test_codecs_of_fewer_bits_or_with_a_scale_are_refused() -> None:
    with pytest.raises(ValueError, match=r"POOLED_EMBEDDINGS_ALL_TO_ALL'\].forward should send float32"):
        wire_of(registry(forward_precision=CommType.INT8), OPERATION)
    with pytest.raises(ValueError, match=r"\].backward should send .* loss scale 8.0"):
        wire_of(registry(backward_precision=CommType.FP16, backward_loss_scale=8.0), OPERATION)


def test_a_gradient_that_float16_cannot_hold_becomes_its_largest_number() -> None:
    sent = Wire(backward=torch.float16).gradient(torch.tensor([1e6, -1e6, 0.25]))
    assert sent.tolist() == [65504.0, -65504.0, 0.25]


@pytest.mark.multirank
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("kind", "sharding"),
    [(kind, sharding) for kind in ("ec", "ebc") for sharding in ("row_wise", "table_wise")],
)
def test_vectors_and_gradients_travel_in_sixteen_bits(kind: str, sharding: str) -> None:
    plain = ranks.run(2, jobs.quantized, kind, sharding, None, None)
    halves = ranks.run(2, jobs.quantized, kind, sharding, CommType.FP16, CommType.BF16)
    for ours, full in zip(halves, plain, strict=True):
        for name, vectors in ours["answers"].items():
            assert vectors.dtype == torch.float32
            assert not torch.equal(vectors, full["answers"][name])
            torch.testing.assert_close(vectors, full["answers"][name], rtol=2e-3, atol=1e-3)
            if sharding == "table_wise" or kind == "ec":  # rounded once, by the owner
                assert torch.equal(vectors, full["answers"][name].half().float())
    ours, full = (all_rows([r["rows"] for r in results]) for results in (halves, plain))
    for name, of_table in full.items():
        for key, row in of_table.items():
            torch.testing.assert_close(torch.tensor(ours[name][key]), torch.tensor(row), rtol=0.05, atol=0.05)
    assert ours != full


@pytest.mark.multirank
@pytest.mark.timeout(240)
def test_codecs_that_are_refused_on_one_rank_raise_on_all() -> None:
    for _, message, _ in ranks.errors(2, jobs.quantized, "ebc", "row_wise", None, None, refused_on=1):
        assert "should send float32, float16 or bfloat16" in message


@pytest.mark.multirank
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["ec", "ebc"])
def test_a_model_may_go_on_before_its_vectors_arrive(kind: str) -> None:
    for result in ranks.run(2, jobs.forward_without_waiting, kind):
        assert result == {"received_in_forward": 0, "received": 1}
