"""REG and KVS: what the registry refuses, and with which words."""

from __future__ import annotations

import re

import pytest
import torch

from reference_impl.config import CacheConfig, ForwardConfig, set_current_config
from reference_impl.layers.attention import Attention
from reference_impl.registry import get_layers

NAME = "model.layers.{}.self_attn.attn"


def build(config: ForwardConfig, index: int, **kwargs: object) -> Attention:
    with set_current_config(config):
        arguments = {"num_heads": 4, "head_size": 8, "scale": 1.0, "num_kv_heads": 2, "prefix": NAME.format(index)}
        return Attention(**(arguments | kwargs))


@pytest.fixture
def config() -> ForwardConfig:
    return ForwardConfig(cache=CacheConfig(block_size=4))


def test_layer_is_found_under_its_prefix(config):
    """REG-1, REG-3."""
    layers = [build(config, index) for index in (2, 0, 1)]
    assert list(get_layers(config, Attention).values()) == layers
    assert config.static_forward_context[NAME.format(0)] is layers[1]


def test_duplicate_prefix_is_refused_and_the_first_object_stays(config):
    """REG-2."""
    first = build(config, 0)
    with pytest.raises(ValueError, match=f"^Duplicate layer name: {re.escape(NAME.format(0))}$"):
        build(config, 0)
    assert config.static_forward_context == {NAME.format(0): first}


def test_layer_without_a_config_is_refused():
    """REG-5."""
    with pytest.raises(AssertionError, match="set_current_config"):
        Attention(4, 8, 1.0, prefix="a.0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prefix": ""}, "^Empty layer name"),
        ({"num_kv_heads": 3}, r"^layer model\.layers\.1\.self_attn\.attn: num_heads \(4\) is not divisible"),
        ({"attn_type": "encoder"}, "does not support attn_type encoder$"),
        ({"head_size": 0}, "does not support head_size 0$"),
        ({"kv_sharing_target_layer_name": NAME.format(1)}, "cannot be the same as the current layer.$"),
        ({"kv_sharing_target_layer_name": NAME.format(5)}, "must come before the current layer.$"),
        ({"kv_sharing_target_layer_name": NAME.format(0) + "x"}, "is not a valid Attention layer in the model.$"),
        ({"kv_sharing_target_layer_name": NAME.format(0), "head_size": 16}, "has head_size 8, but the current"),
    ],
)
def test_refused_layer_leaves_no_trace(config, arguments, message):
    """REG-4, REG-6, REG-7, KVS-1, KVS-2, KVS-3, KVS-7."""
    build(config, 0)
    before = dict(config.static_forward_context)
    with pytest.raises(ValueError, match=message):
        build(config, 1, **arguments)
    assert config.static_forward_context == before


def test_target_of_another_kind_is_refused(config):
    """KVS-4."""
    config.static_forward_context[NAME.format(0)] = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"must be the same type as the current layer \(decoder\)\.$"):
        build(config, 1, kv_sharing_target_layer_name=NAME.format(0))


def test_target_that_shares_is_refused(config):
    """KVS-8."""
    build(config, 0)
    build(config, 1, kv_sharing_target_layer_name=NAME.format(0))
    with pytest.raises(ValueError, match="itself shares the cache of"):
        build(config, 2, kv_sharing_target_layer_name=NAME.format(1))
