"""Model files as texts, for tests that trace them."""

from pathlib import Path

from autoplan.tracing.model_source import model_source
from autoplan.tracing.trace import trace_model

EXAMPLES = Path(__file__).parent.parent / "examples"
MAKE_BATCH = "def make_batch(n):\n    return torch.zeros(n, 4), torch.zeros(n, 4)\n"
LOSS = "def loss_fn(outputs, targets):\n    return (outputs - targets).square().mean()\n"
LINEAR = "def build_model():\n    return nn.Linear(4, 4)\n"


def trace_example(name, **overrides):
    return trace_model(model_source(EXAMPLES / name, overrides))


def write(tmp_path, text):
    path = tmp_path / "model.py"
    path.write_text("import torch\nfrom torch import nn\n" + text)
    return path


def model_text(forward):
    return (
        f"class Model(nn.Linear):\n    def forward(self, x):\n        {forward}\n"
        "def build_model():\n    return Model(4, 4)\n" + MAKE_BATCH
    )
