import signal
import threading

import pytest

from optpipe.core.process import handle_interrupts

SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])


@pytest.fixture(autouse=True)
def _handlers():
    """As a program begins, whatever the test runner does with SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@SIGNALS
def test_both_signals_interrupt_and_the_handlers_come_back(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), handle_interrupts():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


@SIGNALS
def test_what_an_extension_module_makes_of_it_is_an_interruption(number):
    def imported():
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt as error:
            message = "initialization failed"
            raise ImportError(message) from error

    with pytest.raises(KeyboardInterrupt), handle_interrupts():
        imported()


@SIGNALS
def test_what_a_rust_library_makes_of_it_is_an_interruption(number):
    class Panic(BaseException):
        """As pyo3 has it."""

    def panics():
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise Panic from None

    with pytest.raises(KeyboardInterrupt), handle_interrupts():
        panics()


@SIGNALS
def test_it_is_not_lost_in_a_destructor(number, capsys):
    class Destroyed:
        def __del__(self):
            signal.raise_signal(number)

    def destroyed():
        Destroyed()
        assert threading.Event().wait(60), "it went on"

    with pytest.raises(KeyboardInterrupt), handle_interrupts():
        destroyed()
    assert capsys.readouterr().err == ""


def test_other_errors_stay_what_they_are():
    with pytest.raises(ZeroDivisionError), handle_interrupts():
        1 / 0  # noqa: B018


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with handle_interrupts():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
