"""CTX: what the forward context refuses, restores and hands out."""

from __future__ import annotations

import threading

import pytest

from reference_impl.config import ForwardConfig
from reference_impl.context import (
    get_attention_context,
    get_forward_context,
    is_forward_context_available,
    override_forward_context,
    set_forward_context,
)
from reference_impl.metadata import BatchDescriptor, CUDAGraphMode

NOT_SET = "^Forward context is not set. Please use `set_forward_context` to set the forward context.$"


def test_reading_outside_a_context_fails():
    """CTX-1."""
    with pytest.raises(AssertionError, match=NOT_SET):
        get_forward_context()


def test_previous_context_is_restored():
    """CTX-2, CTX-3."""
    config = ForwardConfig()
    metadata, slots = {}, {}
    with set_forward_context(metadata, config, slot_mapping=slots) as outer:
        assert get_forward_context() is outer
        assert outer.no_compile_layers is config.static_forward_context
        assert outer.attn_metadata is metadata
        assert outer.slot_mapping is slots
        with pytest.raises(ZeroDivisionError), set_forward_context(None, config) as inner:
            raise ZeroDivisionError if get_forward_context() is inner else AssertionError
        assert get_forward_context() is outer
        with override_forward_context(None), pytest.raises(AssertionError, match=NOT_SET):
            get_forward_context()
        assert get_forward_context() is outer
    assert not is_forward_context_available()


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY, None, "FULL"])
def test_runtime_mode_that_no_step_can_run_in_is_refused(mode):
    """CTX-8."""
    config = ForwardConfig()
    with set_forward_context(None, config) as outer:
        with (
            pytest.raises(AssertionError, match="^Invalid cudagraph runtime mode: "),
            set_forward_context(None, config, cudagraph_runtime_mode=mode),
        ):
            pass
        assert get_forward_context() is outer


def test_descriptor_is_made_from_num_tokens():
    """CTX-8."""
    with set_forward_context(None, ForwardConfig(), num_tokens=7, cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE) as c:
        assert c.batch_descriptor == BatchDescriptor(7)
    with set_forward_context(None, ForwardConfig(), num_tokens=7) as c:
        assert c.batch_descriptor is None


def test_missing_layer_is_named():
    """CTX-4."""
    with set_forward_context({}, ForwardConfig()), pytest.raises(KeyError, match=r"^a\.0: "):
        get_attention_context("a.0")


def test_slot_mapping_that_is_no_dict_is_refused():
    """CTX-5."""
    config = ForwardConfig()
    config.static_forward_context["a.0"] = object()
    with (
        set_forward_context(None, config, slot_mapping=[{}]),
        pytest.raises(AssertionError, match="^Expected slot_mapping to be a dict, got <class 'list'>"),
    ):
        get_attention_context("a.0")


def test_leaving_out_of_order_is_detected():
    """CTX-9."""
    config = ForwardConfig()
    first, second = set_forward_context(None, config), set_forward_context(None, config)
    first.__enter__()
    inner = second.__enter__()
    with pytest.raises(RuntimeError, match="^Forward context left out of order"):
        first.__exit__(None, None, None)
    assert get_forward_context() is inner
    second.__exit__(None, None, None)
    assert not is_forward_context_available()


def test_threads_do_not_see_each_others_context():
    """CTX-9."""
    seen = []
    with set_forward_context(None, ForwardConfig()):
        thread = threading.Thread(target=lambda: seen.append(is_forward_context_available()))
        thread.start()
        thread.join()
    assert seen == [False]
