"""Implementations that misbehave, for the tests of the command line."""

from __future__ import annotations

import os
import signal

from harness.adapters.reference import ReferenceImplementation, ReferenceModel

right = ReferenceModel.attend


def nan(model, name, query, key, value):
    return right(model, name, query, key, value) * float("nan")


def wrong_shape(model, name, query, key, value):
    return right(model, name, query, key, value).flatten(1)


def wrong_dtype(model, name, query, key, value):
    return right(model, name, query, key, value).double()


def no_tensor(model, name, query, key, value):
    return None


def mutates(model, name, query, key, value):
    output = right(model, name, query, key, value)
    value.zero_()
    return output


def raises(model, name, query, key, value):
    raise RuntimeError("first line\nsecond line")


def dies(model, name, query, key, value):
    if query.shape[0] > 20:
        os.kill(os.getpid(), signal.SIGSEGV)
    return right(model, name, query, key, value)


def leaves(model, name, query, key, value):
    os._exit(0)


def wrong_head(model, name, query, key, value):
    return right(model, name, query.flip(1), key, value)


def talks(model, name, query, key, value):
    print("what the implementation prints is not the report")  # noqa: T201
    return right(model, name, query, key, value)


def interrupts(model, name, query, key, value):
    raise KeyboardInterrupt


def dies_of_a_nameless_signal(model, name, query, key, value):
    os.kill(os.getpid(), 40)


_outputs = {}


def remembers(model, name, query, key, value):
    output = right(model, name, query, key, value)
    return _outputs.setdefault((query.shape, query.dtype), output).clone()


class Subject:
    """The reference as a bare kernel, with another `attend`."""

    def __init__(self, attend):
        self.reference = ReferenceImplementation(attend.__name__, "eager")
        self.info = self.reference.info
        self.model = type("Model", (ReferenceModel,), {"attend": attend})

    def build(self, config, layers):
        return self.model(self.reference.new_config(config), layers, "cpu")


def __getattr__(name):
    if name.startswith("subject_"):
        return Subject(globals()[name.removeprefix("subject_")])
    raise AttributeError(name)
