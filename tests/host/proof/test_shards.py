"""Which parameters are in parts, and who gets their gradients. Real engines are in test_ranks.py and tests/engines."""

import torch

from swift_vlpack.proof.gradients import Parameters
from swift_vlpack.proof.shards import is_sharded, shape_of, sharded_by, whole
from tests.host.proof import sabotage as s
from tests.host.proof.runners import text_samples


def test_parameters_of_an_ordinary_model_are_whole():
    """ISO-24"""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    assert sharded_by(model) == ""
    found = whole(model, ["0.weight", "1.bias"])
    assert found["0.weight"] is model[0].weight
    assert found["1.bias"] is model[1].bias


def test_engine_that_is_not_known_is_named_and_nothing_of_it_is_compared():
    """ISO-24"""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    model[0].weight.data = torch.empty(0)
    assert sharded_by(model) == "an engine"
    assert is_sharded(model)
    assert whole(model, ["0.weight", "0.bias"]) == {}


def test_shape_of_a_part_is_that_of_the_whole():
    """ISO-24: ZeRO-3 leaves an empty tensor of one dimension, which would look like a norm's weight."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    model[0].weight.data = torch.empty(0)
    model[0].weight.ds_id, model[0].weight.ds_shape = 0, torch.Size([2, 3])
    assert sharded_by(model) == "ZeRO-3"
    assert shape_of(model[0].weight) == (2, 3)
    assert whole(model, ["0.weight"])["0.weight"] is model[0].weight


def passed(right, **options):
    """A pass over a packed sequence, by a loss of its own."""

    def loss(inputs, packed):
        return right.model(**{name: one for name, one in inputs.items() if name != "labels"}).logits.square().mean()

    right.loss = loss
    parameters = Parameters(right.model.train(), all_trained=True, tokens=torch.arange(3, 9), **options)
    return parameters, right.run(text_samples(9, 14), packed=True, parameters=parameters)


def test_hooks_of_an_engine_get_no_gradient_of_a_proof_and_stay():
    """ISO-23 ISO-24: as DeepSpeed puts one on each parameter that it trains."""
    right, got = s.llama(), []
    trained = list(right.model.parameters())
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(got.append)
    _, seen = passed(right, has_engine=True)
    assert got == []
    assert len(seen.gradient) == len(trained)
    assert all(one.grad is None for one in trained)
    right.model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert {id(one) for one in got} == {id(one) for one in trained}


def test_engine_without_hooks_on_parameters_is_not_given_gradients_of_a_proof():
    """ISO-23: nobody can see how it gets them."""
    right = s.llama()
    parameters, seen = passed(right, has_engine=True)
    assert "an engine takes them in the backward" in parameters.left_out
    assert seen.gradient == {}
    assert all(one.requires_grad and one.grad is None for one in right.model.parameters())
