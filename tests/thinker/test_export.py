"""`torch.export` and ONNX of whole models, for batches of any size and length."""

import pytest
import torch

from thinker import RowsTask, presets

ROWS = [("12 3", "45 6"), ("1231", "4556"), ("31", "55"), ("3 1", "556"), ("13", "54")] * 8


class Answers(torch.nn.Module):
    """A model with a fixed number of steps, from tokens and mask to logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, mask):
        return self.model(tokens, mask, n_step=4).logits


def batch(model, rows, length):
    """Return tokens and a mask; the second row is two tokens shorter."""
    tokens = torch.randint(1, model.config.vocab_size, (rows, length))
    mask = torch.ones(rows, length, dtype=torch.bool)
    mask[1, slice(0, 2) if model.config.causal else slice(length - 2, None)] = False
    return tokens, mask


def exported(kind):
    torch.manual_seed(0)
    preset = getattr(presets, kind)()
    model = preset.thinker(preset.data(RowsTask(ROWS)), longest=32).eval()
    answers = Answers(model)
    dims = {0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("length", min=2, max=32)}
    program = torch.export.export(answers, batch(model, 2, 6), dynamic_shapes=(dims, dims))
    return answers, program


@pytest.mark.parametrize("kind", ["scan", "exchange", "pointer"])
def test_an_exported_model_takes_other_batches_and_lengths(kind):
    answers, program = exported(kind)
    inputs = batch(answers.model, 5, 19)
    torch.testing.assert_close(program.module()(*inputs), answers(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.peers
@pytest.mark.parametrize("kind", ["scan", "exchange", "pointer"])
def test_onnxruntime_runs_an_exported_model(kind, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    answers, program = exported(kind)
    torch.onnx.export(program).save(str(tmp_path / "model.onnx"))
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    inputs = batch(answers.model, 5, 19)
    names = [given.name for given in session.get_inputs()]
    arrays = [value.numpy() for value in inputs]
    (found,) = session.run(None, dict(zip(names, arrays, strict=True)))
    torch.testing.assert_close(torch.tensor(found), answers(*inputs), rtol=1e-4, atol=1e-4)
