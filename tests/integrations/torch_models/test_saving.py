"""Models of plain torch go to a folder and come back: tied weights, views, buffers and the state of every adapter."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bayesattn as ba
from bayesattn.convert import bayesianize, conversion_report, load_bayesian, save_bayesian
from bayesattn.convert.saving import CONFIG_FILE


class Caller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 7

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


class Model(nn.Module):
    """A torch layer, a caller of torch's attention, a head tied to the embedding, buffers that share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 14)
        self.layer = nn.TransformerEncoderLayer(14, 2, 5, batch_first=True)
        self.caller = Caller()
        self.norm = nn.BatchNorm1d(14)
        self.head = nn.Linear(14, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.randn(3, 5))
        self.register_buffer("row", self.table[1])
        self.register_buffer("flat", self.table.view(-1))

    def forward(self, ids):
        x = self.layer(self.embedding(ids))
        x = self.caller(x.unflatten(-1, (2, 7)).transpose(1, 2)).transpose(1, 2).flatten(2)
        return self.head(self.norm(x.mean(dim=1)) + self.row.sum())


def trained() -> Model:
    model = bayesianize(Model(), ba.AttentionConfig("BAM-WC", weibull_k=2.0, prior_hidden_dim=3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ba.record_kl() as kl:
        loss = model(torch.randint(11, (5, 3))).logsumexp(-1).sum()
    (loss + kl.total().sum()).backward()
    optimizer.step()
    return model.eval()


def test_a_whole_model_goes_round_exactly(tmp_path):
    model = trained()
    save_bayesian(model, tmp_path, whole=True)
    other, ids = load_bayesian(Model().eval(), tmp_path), torch.randint(11, (2, 3))
    assert conversion_report(other) == conversion_report(model)
    assert len(conversion_report(model).converted) == 2
    state = other.state_dict()
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert other.head.weight is other.embedding.weight
    draws = []
    for each in (model, other):
        torch.manual_seed(3)
        with ba.sampling(each), ba.record_kl() as kl:
            draws += [each(ids), kl.total()]
    assert torch.equal(draws[0], draws[2])
    assert torch.equal(draws[1], draws[3])


def test_the_priors_alone_leave_the_host_as_it_is(tmp_path):
    model, other = trained(), Model().eval()
    before = other.embedding.weight.clone()
    save_bayesian(model, tmp_path)
    load_bayesian(other, tmp_path)
    assert torch.equal(other.embedding.weight, before)
    assert torch.equal(other.caller.bayes.bayes_prior.weight_in, model.caller.bayes.bayes_prior.weight_in)


def test_a_model_on_the_meta_device_is_not_filled_in_silence(tmp_path):
    save_bayesian(trained(), tmp_path, whole=True)
    with torch.device("meta"):
        model = Model()
    with pytest.raises(ValueError, match="that are not on the meta device"):
        load_bayesian(model, tmp_path)
    assert not conversion_report(model).converted


def test_a_description_that_names_a_lost_tensor_is_refused(tmp_path):
    save_bayesian(trained(), tmp_path, whole=True)
    description = json.loads((tmp_path / CONFIG_FILE).read_text())
    assert description["shared"] == {"head.weight": "embedding.weight"}
    description["shared"]["head.weight"] = "nowhere.weight"
    (tmp_path / CONFIG_FILE).write_text(json.dumps(description))
    with pytest.raises(ValueError, match=r"lacks \['nowhere\.weight'\]"):
        load_bayesian(Model(), tmp_path)
