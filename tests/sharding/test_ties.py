"""A parameter in several places is one parameter under several names."""

from __future__ import annotations

import pytest
import torch
from support.models import Chain, layer, tie
from torch import nn

from composer_fsdp2.sharding.ties import parameter_uses, tie_groups

pytestmark = pytest.mark.any_torch


def test_every_name_of_a_tied_parameter_is_known():
    """A tie that is missed comes apart while sharding, and the two halves train away from each other."""
    model = Chain(first=layer(), second=Chain(inner=layer()), third=layer())
    tie(model.first, model.second.inner)
    assert tie_groups(model) == (("first.weight", "second.inner.weight"),)
    assert [use.names for use in parameter_uses(model)] == [
        ("first.weight", "second.inner.weight"),
        ("third.weight",),
    ]


def test_first_name_is_that_of_named_parameters():
    """Reports name a tied parameter as the user's own loop over the model does."""
    model = Chain(first=Chain(inner=layer()), second=layer())
    tie(model.second, model.first.inner)
    assert [use.name for use in parameter_uses(model)] == [name for name, _ in model.named_parameters()]


def test_module_in_two_places_gives_its_parameters_two_names():
    """A layer that is used twice is found under both of its paths."""
    shared = layer()
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    assert tie_groups(model) == (("a.weight", "b.0.weight"),)


def test_equal_values_are_no_tie():
    """Two parameters that begin with the same values are trained apart."""
    model = Chain(first=layer(), second=layer())
    model.second.load_state_dict(model.first.state_dict())
    assert tie_groups(model) == ()


def test_parameters_on_meta_and_absent_ones():
    """A model without values yet has its ties already; `bias=None` is no parameter."""
    with torch.device("meta"):
        model = Chain(first=layer(), second=layer())
    tie(model.first, model.second)
    assert [use.names for use in parameter_uses(model)] == [("first.weight", "second.weight")]
